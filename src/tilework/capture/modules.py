"""Modules as two programs, forward and backward, for training loops that stay as they are.

``torch.compile`` hands functions and modules with DTensors to :class:`CompiledFunction`. The
recorded call also takes the gradients of the results, by ``torch.autograd.grad`` with made-up
gradients: the part of the record after the forward pass is the backward pass. Later calls run the
first program, and autograd runs the second in the program's backward pass.

A pipeline's stages have the backward pass cut once more: gradients of the arguments come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tilework.capture.program.code import ProgramCode
from tilework.capture.program.glue import ProgramConditions
from tilework.capture.program.graph import BOUNDARY, Graph, Input, Instruction, Value
from tilework.capture.program.number import Number
from tilework.capture.program.passes import cut_backward
from tilework.capture.program.place import Argument, is_dtensor, plain
from tilework.capture.program.record import NOT_CURRENT, StepRecord
from tilework.capture.program.same_program import VotingRanks, Way, compare_program
from tilework.capture.program.skeleton import take_apart
from tilework.capture.recording.arguments import StepCall, is_size
from tilework.capture.recording.effects import HasGraphError, set_by
from tilework.capture.recording.places import StatePlaces
from tilework.capture.recording.recorded_call import Recording, record_call
from tilework.capture.step import MOST_RECORDS, Program, key_of_call
from tilework.comm.per_call.internal import current_recorder, unrecorded
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, wrap_as
from tilework.errors import CaptureError
from tilework.parallel import DistributedDataParallel
from tilework.parallel.fully_sharded.module import units_of
from tilework.parallel.fully_sharded.unit import as_program, is_in_forward


def compiled_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Make a function that runs recorded programs in place of ``function``.

    See :class:`CompiledFunction`. For ``DistributedDataParallel`` only the module within is
    recorded: the hooks of the parameters reduce the gradients from the backward program.
    """
    owner = _module_of(function)
    if not isinstance(owner, DistributedDataParallel):
        return CompiledFunction(function, backend)
    inner: Any = owner.module
    compiled = CompiledFunction(inner._call_impl, backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        before = inner._compiled_call_impl
        inner._compiled_call_impl = compiled
        try:
            return function(*args, **kwargs)
        finally:
            inner._compiled_call_impl = before

    return call


def _module_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of; None if there is none."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


class CompiledFunction:
    """A function or module whose calls run recorded programs; collective as the function is.

    The first call runs the function as it is.

    Args:
        backend: "python" or "inductor", as for ``capture``.
        cuts: True to cut the backward pass, for :class:`CutCall`.

    Raises:
        CaptureError: In a call that is recorded (the second, and each call with other layouts):
            the function cannot be recorded. In the first call: the module lies within a module
            that ``fully_shard`` has sharded.
    """

    def __init__(self, function: Callable[..., Any], backend: str, cuts: bool = False) -> None:
        self._function, self._backend, self._cuts = function, backend, cuts
        self._last: CutCall | None = None
        self._without_grad: Program[..., Any] = Program(function, backend, check=True)
        self._name = getattr(function, "__name__", type(function).__name__)
        self.forget()
        #: True if no result needs a gradient: a whole step, or a function of inputs without
        #: gradients.
        self._is_step = False

    def forget(self) -> None:
        """Drop all programs: the next call runs the function unchanged, as the first call did."""
        self._ranks = VotingRanks(self._name, self)
        #: By key of a call, the programs.
        self._passes: dict[Any, list[_Passes]] = {}
        self._is_warm = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._last = None
        if current_recorder() is not None:
            return self._function(*args, **kwargs)
        if not self._is_warm:
            if is_in_forward():
                raise CaptureError(
                    "a module is compiled within a module that fully_shard has sharded: compile "
                    "the outermost module, which includes the others"
                )
            result = self._function(*args, **kwargs)
            self._is_warm = self._without_grad.is_warm = True
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self._is_step = torch.is_grad_enabled() and not any(x.requires_grad for x in made)
            return result
        if self._is_step or not torch.is_grad_enabled():
            try:
                return self._without_grad(*args, **kwargs)
            except HasGraphError:  # recorded again, as a parameter that was frozen trains
                self._is_step = False
        leaves, key = key_of_call(args, kwargs)
        known = self._passes.get(key, [])
        for at, passes in enumerate(known):
            inputs = passes.forward.inputs_of(leaves)
            if inputs is None:
                continue
            known.insert(0, known.pop(at))  # as the next call is probably of this kind, too
            if self._ranks.decide(Way.RUN) is not Way.RUN:  # another rank has no record
                known.remove(passes)
                return self._record(key, leaves, args, kwargs)
            result, call = passes.run(inputs, leaves)
            if result is not NOT_CURRENT:
                self._last = call if self._cuts else None
                return result
        self._ranks.decide(Way.RECORD)
        return self._record(key, leaves, args, kwargs)

    def take_last(self) -> CutCall | None:
        """The last call, once, if a program with a cut backward pass ran; else None."""
        last, self._last = self._last, None
        return last

    def _record(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        every = [passes for known in self._passes.values() for passes in known]
        if len(every) >= MOST_RECORDS:
            self._passes.clear()
            every = []
        call = _Joint(self._function, self._name, leaves, args, kwargs)
        passes, result = _record(call, self._ranks, every, self._cuts)
        if passes is not None:
            passes.backend = self._backend
            self._passes.setdefault(key, []).append(passes)
            passes.joint.release()
        return result


class _Joint(StepCall):
    """A call that runs the function and then takes the gradients of the results."""

    def run(self) -> Any:
        recorder: Any = current_recorder()
        needed = _needing_grad(recorder.places, self.leaves)
        result = super().run()
        _refuse_graphs(recorder.places)
        outs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
        if not outs:
            raise CaptureError(f"no result of {self.name} requires a gradient: use no_grad()")
        grads = [unrecorded(_some_grad)(out) for out in outs]
        recorder.begin_backward(len(self.leaves), grads)
        with _without_hooks(needed):
            # The graph stays for this call's own backward pass.
            found = torch.autograd.grad(outs, needed, grads, retain_graph=True, allow_unused=True)
        used = [i for i, grad in enumerate(found) if grad is not None]
        recorder.needed = [needed[i] for i in used]
        return result, [found[i] for i in used]


def _needing_grad(places: StatePlaces, leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors with ``requires_grad`` among places and arguments, each once."""
    found: dict[int, Tensor] = {}
    for tensor in (*[tensor for place, tensor in places.slots if place.how != "grad"], *leaves):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            found.setdefault(id(plain(tensor)), tensor)
    return list(found.values())


def _refuse_graphs(places: StatePlaces) -> None:
    """Refuse tensors that a function keeps with a graph, since a program makes no graph."""
    for place, tensor in set_by(places):
        if tensor.grad_fn is not None:
            raise CaptureError(
                f"a compiled function keeps {place.text} with a graph, such as a part of the loss, "
                f"and later calls would give it none: return the tensor, or keep detach() of it"
            )


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Remove hooks of gradients within the block: autograd calls them after the program."""
    found = [plain(tensor)._backward_hooks for tensor in tensors]
    kept = [(hooks, dict(hooks)) for hooks in found if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _some_grad(out: Any) -> Tensor:
    if not is_dtensor(out):
        return torch.ones_like(out)
    spec = layout_of(out).grad_spec
    return wrap_as(DTensor, torch.ones(spec.local_shape, dtype=out.dtype, device=out.device), spec)


def _record(
    call: _Joint, ranks: VotingRanks, known: Sequence[_Passes], cuts: bool
) -> tuple[_Passes | None, Any]:
    """Run a call and record both passes; no programs if the call made groups. Collective."""
    needed: list[Tensor] = []
    owner = _module_of(call.step)
    made: list[_Passes] = []

    def accept(record: StepRecord, result: Any) -> None:
        found, tree = tree_flatten(result[0], is_size)
        needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in found]
        same = next((each for each in known if each.joint.code is record.code), None)
        outs = [x for x, needs in zip(found, needs_grad, strict=True) if needs]
        needing = _Needing(needed, outs, record, call.leaves, cuts)
        made.append(_Passes(record, ranks, needing, (tree, needs_grad), same))

    codes = list({id(each.joint.code): each.joint.code for each in known}.values())
    with as_program([] if owner is None else units_of(owner, True)):
        how = Recording(ranks, check=True, codes=codes)
        _, (result, _) = record_call(call, how, needed=needed, accept=accept)
    return made[0] if made else None, result


class _Needing:
    """The tensors ``needed`` that need gradients, and which gradients come first.

    ``outs`` are the results that require gradients, with graphs; ``joint`` is the record of both
    passes. With ``cuts`` the gradients of arguments come first; else all do.
    """

    def __init__(
        self,
        needed: Sequence[Tensor],
        outs: Sequence[Tensor],
        joint: StepRecord,
        leaves: Sequence[Any],
        cuts: bool,
    ) -> None:
        #: The number of leaves, behind which gradients of results are arguments of the record.
        self.count, self.cuts = len(leaves), cuts
        paths = {id(each.tensor): each for each in joint.graph.inputs}
        given = {id(plain(x)) for x in leaves}

        def source(tensor: Any) -> Callable[[Sequence[Any]], Tensor]:
            local = plain(tensor)
            found = paths.get(id(local))
            if found is None:
                return lambda _: local
            path = found.path
            return path.of if found.is_argument else lambda _: path.get()

        self.sources = [source(each) for each in needed]
        #: The positions of the gradients of the first half, and of the second.
        self.first = [i for i, x in enumerate(needed) if not cuts or id(plain(x)) in given]
        self.second = [i for i in range(len(needed)) if i not in self.first]
        reached = [_leaves_behind(each) for each in outs] if len(outs) > 1 else [set()]
        #: For each tensor, the results from which it gets a gradient; empty: from any.
        self.outs = [{i for i, ids in enumerate(reached) if id(plain(x)) in ids} for x in needed]

    def without(self, grads: Sequence[Any], made: Sequence[Any], at: Sequence[int]) -> list[Any]:
        """Gradients, without those of tensors that no result with a gradient leads to."""
        given = {i for i, grad in enumerate(grads) if grad is not None}
        if len(given) == len(grads):
            return list(made)
        pairs = zip(at, made, strict=True)
        return [None if given.isdisjoint(self.outs[i] or given) else x for i, x in pairs]


def _leaves_behind(out: Tensor) -> set[int]:
    """The ids of the leaves, of DTensors the local tensors, to which a graph leads."""
    todo, seen, found = [out.grad_fn], set(), set()
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(plain(getattr(node, "variable", None))))
            todo += [following for following, _ in node.next_functions]
    return found


def _position(leaf: Any, part: StepRecord) -> int | None:
    value = value_in(leaf)
    return None if value is None else part.index_of(value)


def _records(
    joint: StepRecord, graphs: Sequence[Graph], same: _Passes | None, ranks: VotingRanks
) -> list[StepRecord]:
    """The records of passes, with the code of a known record if possible. Collective."""
    records = []
    known: Sequence[StepRecord | None] = [None] * len(graphs) if same is None else same.parts
    names = ("forward", "backward") if len(graphs) == 2 else ("forward", "inputs", "weights")
    for name, graph, old in zip(names, graphs, known, strict=True):
        held = joint.held if graph is graphs[0] else ProgramConditions([], [], [], [])
        skeleton = take_apart(graph, [])
        name = f"{joint.name}_{name}"
        if old is not None and old.code.skeleton.fits(skeleton):
            code = old.code
            code.join(skeleton)
        else:
            digests, _ = compare_program(graph, name, ranks)
            code = ProgramCode(name, graph, [], digests, skeleton)
        records.append(StepRecord(name, graph, None, held, code, skeleton.constants))
    return records


def _refuse_programs(
    name: str, inputs: Sequence[Input], after: Sequence[Instruction], outs: Sequence[Any]
) -> None:
    """Refuse passes that would write once more, or have no graph."""
    outside = {each.value.memory for each in inputs}
    if any(not outside.isdisjoint(each.writes) for each in after):
        raise CaptureError(
            f"the backward pass of {name} writes to a tensor from outside, as the recomputing of a "
            f"BatchNorm writes to the buffers: recording runs backward once more. Recompute other "
            f"modules, or leave the function uncompiled"
        )
    if any(each.value in outs for each in inputs):
        raise CaptureError(
            f"{name} returns one of its arguments or parameters, which a compiled function cannot "
            f"do: return a copy (clone())"
        )


class _Passes:
    """The forward and the backward program of one kind of call."""

    def __init__(
        self,
        joint: StepRecord,
        ranks: VotingRanks,
        needing: _Needing,
        result: tuple[TreeSpec, Sequence[bool]],
        same: _Passes | None,
    ) -> None:
        self.backend, self.name, self.joint = "python", joint.name, joint
        graph, self.needing = joint.graph, needing
        self._tree, needs_grad = result
        self._leaves = graph.result[: len(needs_grad)]
        grads = graph.result[len(needs_grad) :]
        #: The values and numbers among the results.
        self._computed = [x for leaf in self._leaves if (x := _computed(leaf)) is not None]
        outs = [
            value_in(leaf) for leaf, needs in zip(self._leaves, needs_grad, strict=True) if needs
        ]
        #: For each result of the forward program, True if it requires a gradient.
        self.flags = [x in outs for x in self._computed]
        border = next(i for i, x in enumerate(graph.instructions) if x.function is BOUNDARY)
        before, after = graph.instructions[:border], graph.instructions[border + 1 :]
        of_outs = [x for x in graph.inputs if x.is_argument and x.path.number >= needing.count]
        self._grad_order = [x.path.number - needing.count for x in of_outs]
        inputs = [x for x in graph.inputs if x not in of_outs]
        _refuse_programs(self.name, inputs, after, outs)
        self._saved = _crossing(inputs, before, after, grads)
        found = [*self._leaves, *self._saved]
        graphs = [Graph(inputs, before, found, graph.places, graph.has_grad_mode)]
        graphs += _halves(self._saved, [x.value for x in of_outs], after, grads, needing)
        #: The forward program, and one or two of the backward pass.
        self.parts = _records(joint, graphs, same, ranks)
        self.forward = self.parts[0]
        #: The positions of results and of saved values among what the forward program returns, and
        #: of gradients and values among what each backward program returns; None: no tensor.
        self._at: list[list[Any]] = [
            list(map(self.forward.index_of, self._computed)),
            list(map(self.forward.index_of, self._saved)),
            *([_position(leaf, part) for leaf in part.graph.result] for part in self.parts[1:]),
        ]

    def run(self, inputs: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
        """The result of the forward program with autograd, or ``NOT_CURRENT``; and the call."""
        self._compile(0, inputs)
        needed = [source(leaves) for source in self.needing.sources]
        computed = self.run_forward([each.detach() for each in inputs])
        if computed is None:
            return NOT_CURRENT, None
        made = _Apply.apply(self, *computed, *needed)  # type: ignore[no-untyped-call]
        kept: Any = dict(zip(self._at[0], made, strict=True))
        results = [self.forward.built(leaf, kept) for leaf in self._leaves]
        node = next(x.grad_fn for x in made if isinstance(x, Tensor) and x.requires_grad)
        return tree_unflatten(results, self._tree), CutCall(node, needed)

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[list[Any], list[Any]] | None:
        """The results and the values saved for backward; None: not for this call."""
        kept = self.forward.attempt(inputs)
        if kept is NOT_CURRENT:
            return None
        for place, leaf in self.forward.graph.places:
            place.set(self.forward.built(leaf, kept))
        return [kept[i] for i in self._at[0]], [kept[i] for i in self._at[1]]

    def run_first(self, saved: Sequence[Any], grads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first backward program: gradients, and values for the second program."""
        made = self.run_part(1, given := [*saved, *[grads[i] for i in self._grad_order]])
        count = len(self.needing.first)
        return made[:count], [*given, *made[count:]]

    def run_part(self, number: int, given: Sequence[Any]) -> list[Any]:
        """Run a backward program; return the results: of gradients the local tensors."""
        self._compile(number, given)
        kept = self.parts[number].compute(given, [])
        return [None if i is None else kept[i] for i in self._at[number + 1]]

    def _compile(self, number: int, inputs: Sequence[Any]) -> None:
        part = self.parts[number]
        if self.backend == "inductor" and not part.was_compiled and part.graph.instructions:
            part.compile(inputs)


class _Apply(torch.autograd.Function):
    """The autograd function that runs the forward and the backward program of a call."""

    @staticmethod
    def forward(
        ctx: Any, passes: _Passes, results: list[Any], saved: list[Any], *needed: Tensor
    ) -> Any:
        flags = passes.flags
        others = [x for x, flag in zip(results, flags, strict=True) if not flag]
        ctx.mark_non_differentiable(*[x for x in others if isinstance(x, Tensor)])
        ctx.set_materialize_grads(False)
        ctx.passes, ctx.first = passes, None
        ctx.outs = [
            (i, {"size": x.shape, "dtype": x.dtype, "device": x.device})
            for i, (x, flag) in enumerate(zip(results, flags, strict=True))
            if flag
        ]
        ctx.others = [Tensor if isinstance(each, Tensor) else each for each in saved]
        ctx.save_for_backward(*[each for each in saved if isinstance(each, Tensor)])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        passes, needing = ctx.passes, ctx.passes.needing
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True needs the gradient of a gradient of {passes.name}, which "
                f"is compiled: a program has no graph. Leave the function uncompiled"
            )
        wanted = [grads[i] for i, _ in ctx.outs]
        saved = _saved_of(ctx)
        made, given = ctx.first or passes.run_first(saved, _with_zeros(ctx, wanted))
        ctx.first = None
        second = passes.run_part(2, given) if needing.second else []
        found: list[Any] = [None] * len(needing.sources)
        for at, each in ((needing.first, made), (needing.second, second)):
            for i, grad in zip(at, needing.without(wanted, each, at), strict=True):
                found[i] = grad
        return None, None, None, *found


def _saved_of(node: Any) -> list[Any]:
    """The values saved for backward; raises if an operator has written to one since."""
    tensors = iter(node.saved_tensors)
    return [next(tensors) if each is Tensor else each for each in node.others]


def _with_zeros(node: Any, grads: Sequence[Tensor | None]) -> list[Tensor]:
    pairs = zip(grads, node.outs, strict=True)
    return [torch.zeros(**like) if grad is None else grad for grad, (_, like) in pairs]


class CutCall:
    """A call of a program, ``node`` of the graph, whose gradients of arguments may come first."""

    def __init__(self, node: Any, needed: Sequence[Tensor]) -> None:
        self._node, self._needed = node, needed

    def input_gradients(self, grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """The arguments that need gradients, with these, by the results' ``grads`` or without."""
        node, passes = self._node, self._node.passes
        with torch.no_grad():
            made, given = passes.run_first(_saved_of(node), _with_zeros(node, grads))
        node.first, at = ([None] * len(made), given), passes.needing.first
        made = passes.needing.without(grads, made, at)
        return [(self._needed[i], grad) for i, grad in zip(at, made, strict=True)]


def value_in(leaf: Any) -> Value | None:
    """The value of a leaf of a result, of a DTensor the local tensor's; None if it is no tensor."""
    if isinstance(leaf, tuple) and leaf and leaf[0] in ("dtensor", "as"):
        return leaf[1]  # type: ignore[no-any-return]
    return leaf if isinstance(leaf, Value) else None


def _computed(leaf: Any) -> Value | Number | None:
    """The value or number of a leaf of a program's result; None if the leaf is a constant."""
    return leaf if isinstance(leaf, Number) else value_in(leaf)


def _crossing(
    inputs: Sequence[Input],
    before: Sequence[Instruction],
    after: Sequence[Instruction],
    grads: Sequence[Any],
) -> list[Value]:
    """The values of the forward program that the backward program uses, to be saved."""
    made = {each.value.number: each.value for each in inputs}
    for each in before:
        made.update({out.number: out for out in each.outputs if out is not None})
    used = {value.number for each in after for value in each.inputs()}
    used |= {value.number for leaf in grads if (value := value_in(leaf)) is not None}
    return [value for number, value in made.items() if number in used]


def _halves(
    saved: Sequence[Value],
    of_outs: Sequence[Value],
    after: Sequence[Instruction],
    grads: Sequence[Any],
    needing: _Needing,
) -> list[Graph]:
    """The programs of the backward pass, for the gradients that come first and for the others."""
    given = [*saved, *of_outs]
    inputs = [Input(value, Argument(i, False), None) for i, value in enumerate(given)]
    mine, others = ([grads[i] for i in at] for at in (needing.first, needing.second))
    if not needing.cuts:
        return [Graph(inputs, list(after), mine, [])]
    wanted = [value for leaf in mine if (value := value_in(leaf)) is not None]
    first, second = cut_backward(of_outs, after, wanted)
    kept = _crossing([], first, second, others)
    more = [Input(x, Argument(len(given) + i, False), None) for i, x in enumerate(kept)]
    return [Graph(inputs, first, [*mine, *kept], []), Graph([*inputs, *more], second, others, [])]
