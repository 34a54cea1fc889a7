"""A record: a program for one kind of call, and the conditions under which it may run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tilework.capture.program.code import ProgramCode
from tilework.capture.program.glue import ProgramConditions, layouts_hold, write_enter, write_leave
from tilework.capture.program.graph import Expected, Graph, Instruction, Unexpected, Value
from tilework.capture.program.memory import SharedMemory
from tilework.capture.program.number import Number
from tilework.capture.program.place import key_of_constant, memory_layout_of
from tilework.capture.program.same_program import Way
from tilework.comm import provenance_digest
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, wrap_as

_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd


#: The result of a record that does not hold for a call: nothing was done.
NOT_CURRENT = object()


class StepRecord:
    """A record of a step: a program for one kind of call, and the conditions of the program besides
    the inputs' layouts.

    ``graph.result`` has the leaves of the result, ``tree`` the structure. See ``Skeleton`` for
    ``constants``.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        tree: Any,
        held: ProgramConditions,
        code: ProgramCode,
        constants: Sequence[Any] = (),
    ) -> None:
        self.name, self.graph, self.tree, self.held, self.code = name, graph, tree, held, code
        self.options, self.way, self.constants, self.guards = held
        self._fixed = constants
        self._places = {
            (id(place.owner), key) for place, _ in graph.places for key in (place.key, None)
        }
        enters_no_grad = torch.is_grad_enabled() and not graph.has_grad_mode
        self._guard: Any = torch.no_grad if enters_no_grad else _BelowAutograd
        self._kept = list({value.number: value for value in graph.kept()}.values())
        self._index = {value.number: i for i, value in enumerate(self._kept)}
        self._options_at: list[Any] = [option.number.value for option in self.options]
        #: The place of the float that last kept the record from running.
        self.varies: Any = None
        self._changed = ""
        #: True once Inductor was asked to compile the program.
        self.was_compiled = False
        #: The program by Inductor; None: not compiled.
        self._compiled: Callable[..., list[Any]] | None = None
        #: The positions of inputs to whose memory the program writes.
        self.written = _written(graph, graph.instructions)
        self._set_undo()
        self._shared: SharedMemory | None = None
        if not graph.keeps_order:
            self._watch_memory([each.tensor for each in graph.inputs])
        #: The layouts of inputs; None: those that move.
        self._layouts = [None if x.moves else memory_layout_of(x.tensor) for x in graph.inputs]
        #: A check of the inputs' layouts.
        self._layouts_hold: Callable[..., bool] = lambda *_: False
        self._enter = write_enter(graph, held)
        self._leave = write_leave(graph, tree, self.index_of)

    def _set_undo(self) -> None:
        """Find what a call is undone from, if the last comparison of a value fails."""
        made = self.graph.instructions
        last = max([i for i, x in enumerate(made) if isinstance(x.function, Expected)], default=0)
        last = len(made) if self.graph.votes_last else last
        #: The positions of inputs that are written before.
        self._undone = _written(self.graph, made[:last])
        draws = [(each.args, each.kwargs) for each in made[:last] if each.kind == "draw"]
        self._redraws = bool(draws)
        #: The generators to which the program has given others by then, besides the rank's.
        self._drawn = [x for x in tree_leaves(draws) if isinstance(x, torch.Generator)]

    def _watch_memory(self, inputs: Sequence[Tensor]) -> SharedMemory:
        moving = [i for i, each in enumerate(self.graph.inputs) if each.moves]
        self._shared = SharedMemory(inputs, moving)
        return self._shared

    # -- conditions --------------------------------------------------------------------------

    def is_current(self, leaves: Sequence[Any]) -> bool:
        """True if all conditions of the record hold for a call. Local."""
        return self.state_holds() and self._options_hold(leaves) and self._inputs_hold()

    def state_holds(self, is_after: bool = False) -> bool:
        """True if state is as recorded; after a call, apart from what the program writes. Local."""
        written = self._places if is_after else ()
        for place, thing in self.way:
            try:
                if place.get() is not thing:
                    self._changed = f"{place.text} is another object"
                    return False
            except LookupError:
                self._changed = f"{place.text} is gone"
                return False
        for place, value in self.constants:
            if (id(place.owner), place.key) in written:
                continue
            try:
                now = place.get()
            except LookupError:
                now = LookupError
            if now is not value and key_of_constant(now) != key_of_constant(value):
                self._changed = f"{place.text} was {_shown(value)} and is {_shown(now)}"
                is_float = isinstance(value, float) and type(now) is type(value)
                self.varies = place if is_float else None
                return False
        return True

    def what_changed(self) -> str:
        """The reason for which the record was last found not to hold, in words."""
        return self._changed

    def _options_hold(self, leaves: Sequence[Any]) -> bool:
        if not self.options:
            return True
        values = [option.get(leaves) for option in self.options]
        if list(map(type, values)) != list(map(type, self._options_at)):
            self._changed = "a number that the step reads has another type"
            return False
        if values == self._options_at:
            self._options_at = values  # 0.0 equals -0.0
            return True
        known = {
            id(option.number): value for option, value in zip(self.options, values, strict=True)
        }
        for function, inputs, result in self.guards:
            now = function(*[_evaluated(each, known) for each in inputs])
            if now != result:
                self._changed = "a number that the step reads takes another branch of the step"
                return False
        self._options_at = values
        return True

    def _inputs_hold(self) -> bool:
        for each, layout in zip(self.graph.inputs, self._layouts, strict=True):
            path = each.path
            if each.is_argument:
                continue  # the key of the call has checked it
            try:
                now = path.get()
                is_same = not each.may_change or all(x.get() is now for x in each.others)
            except LookupError:
                now, is_same = None, False
            is_same = is_same and not (each.is_local and layout_of(path.owner) is not each.layout)
            expected = each.layout if each.may_change else layout
            if not is_same or now is None or memory_layout_of(now) != expected:
                self._changed = f"{path.text} is another tensor, or has another layout"
                return False
            if now is not each.tensor and not each.may_change:
                self._changed = f"{path.text} is another tensor"
                return False
        return True

    def release(self) -> None:
        """Drop the references to inputs of the recorded call that later calls may replace."""
        for each in self.graph.inputs:
            if each.moves:
                each.tensor = None
        self.graph.instructions = self.code.graph.instructions

    # -- a call ------------------------------------------------------------------------------

    def inputs_of(self, leaves: Sequence[Any]) -> list[Tensor] | None:
        """The inputs of a call of this record's key; None if the program may not run for it."""
        inputs = self._enter(leaves)
        if inputs is None or not self._layouts_hold(*inputs):
            if not self.is_current(leaves):
                return None
            inputs = self._enter(leaves)
            if inputs is None:
                return None
            self._layouts_hold = layouts_hold(inputs)
        elif not self._options_hold(leaves):
            return None
        if self._shared is not None and not self._shared.holds(inputs):
            self._changed = "other tensors share memory"
            return None
        return inputs

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run the program for inputs that were checked, and return the step's result.

        ``NOT_CURRENT`` if a value on which the recorded call has branched is another one in this
        call: then nothing was changed.
        """
        kept = self.attempt(inputs)
        return kept if kept is NOT_CURRENT else self._leave(kept)

    def attempt(self, inputs: Sequence[Tensor]) -> Any:
        """Run the program as :meth:`run` does, and return the values that outlive the call."""
        copies = bytes_by_storage([inputs[i] for i in self._undone])
        drawn = [*generators_of_rank(), *self._drawn] if self._redraws else []
        states = [(generator, generator.get_state()) for generator in drawn]
        kept, is_other = NOT_CURRENT, False
        try:
            kept = self.compute(inputs, self._options_at)
        except Unexpected as error:
            self._changed, is_other = str(error), True
        if self.graph.votes_last:
            way = self.code.digests.ranks.decide(Way.RECORD if is_other else Way.RUN)
            if way is not Way.RUN and not is_other:
                self._changed, is_other = "another rank branched on another value", True
        if not is_other:
            return kept
        for i in self._undone:
            storage_bytes_of(inputs[i]).copy_(copies[key_of_storage(inputs[i])])
        for generator, state in states:
            generator.set_state(state)
        return NOT_CURRENT

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Compile the program by Inductor for later calls with inputs like these. Local; takes
        seconds to minutes.

        A program that takes a view with a conjugate or negative bit runs as Python.
        """
        self.was_compiled = True
        pairs = self._watch_memory(inputs).pairs
        if any(each.is_conj() or each.is_neg() for each in inputs):
            warnings.warn(
                f"{self.name} runs as Python, not by Inductor: it takes a view with a conjugate or "
                f"negative bit",
                stacklevel=2,
            )
            return
        memories = [each.value.memory for each in self.graph.inputs]
        written = {memories[i] for i in self.written}
        shared = {
            i for pair in pairs if not written.isdisjoint(memories[i] for i in pair) for i in pair
        }
        self._compiled = self.code.compiled(inputs, self._values(), sorted(shared))
        self._guard = torch.no_grad

    @property
    def is_compiled(self) -> bool:
        """True if Inductor has compiled the program."""
        return self._compiled is not None

    @property
    def options_now(self) -> list[Any]:
        """The options in the last call for which the record held."""
        return self._options_at

    def compute_as_python(self, inputs: Sequence[Tensor], options: Sequence[Any]) -> list[Any]:
        """Run the program as :meth:`compute` does, by torch's operators one after the other."""
        compiled, self._compiled = self._compiled, None
        try:
            return self.compute(inputs, options)
        finally:
            self._compiled = compiled

    def _values(self) -> list[Any]:
        """The constants in which records of this program differ."""
        return [self._fixed[i] for i in self.code.holes]

    def compute(self, inputs: Sequence[Tensor], options: Sequence[Any]) -> list[Any]:
        """Run the program, and return the values that outlive the call. Sets no places."""
        code = self.code
        digests = code.purpose.digests = code.digests.of_next_run()
        before = provenance_digest.enter(0, code.purpose, None)
        try:
            # Local tensors may be of classes with their own handling of operators.
            with torch._C.DisableTorchFunctionSubclass(), self._guard():
                if self._compiled is not None:
                    return self._compiled(*inputs, *options, *digests)
                python = code.python if current_world().sink is None else code.traced()
                return python.run(*inputs, *self._values(), *options, *digests)
        finally:
            provenance_digest.leave(before)

    def built(self, leaf: Any, kept: Sequence[Any]) -> Any:
        """Make a leaf of the result or of a place from ``kept``, the result of :meth:`compute`."""
        if isinstance(leaf, tuple) and leaf and leaf[0] == "dtensor":
            return wrap_as(DTensor, kept[self.index_of(leaf[1])], leaf[2], leaf[3])
        if isinstance(leaf, tuple) and leaf and leaf[0] == "as":
            return kept[self.index_of(leaf[1])].as_subclass(leaf[2])
        if isinstance(leaf, Value | Number):
            return kept[self.index_of(leaf)]
        return leaf

    def index_of(self, leaf: Value | Number) -> int:
        """The position of a value or number in what :meth:`compute` returns."""
        if isinstance(leaf, Value):
            return self._index[leaf.number]
        numbers = [each for each in self.graph.result if isinstance(each, Number)]
        return len(self._kept) + next(i for i, each in enumerate(numbers) if each is leaf)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _written(graph: Graph, instructions: Sequence[Instruction]) -> list[int]:
    """The positions of inputs to whose memory the instructions write."""
    written = {memory for each in instructions for memory in each.writes}
    return [i for i, each in enumerate(graph.inputs) if each.value.memory in written]


def storage_bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, as a tensor that shares the memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def key_of_storage(tensor: Tensor) -> int:
    """A key that tensors in one storage share."""
    return int(tensor.untyped_storage()._cdata)


def bytes_by_storage(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of the bytes of tensors' storages, by :func:`key_of_storage`."""
    found = {key_of_storage(each): each for each in tensors}
    return {key: storage_bytes_of(each).clone() for key, each in found.items()}


def generators_of_rank() -> list[torch.Generator]:
    """The generators from which operators of this rank draw, if they are given none."""
    own = current_world().generator
    found = [torch.default_generator if own is None else own]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def copies_of(inputs: Sequence[Tensor], kept: Mapping[int, Tensor]) -> list[Tensor]:
    """The inputs before the step: ``kept`` has the old bytes of written storages, by key."""
    storages = {key: saved.clone().untyped_storage() for key, saved in kept.items()}
    before = []
    for each in inputs:
        tensor: Tensor = each.detach()
        storage = storages.get(key_of_storage(tensor))
        if storage is not None:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.set_(storage, *place)
        before.append(tensor)
    return before


def _evaluated(thing: Any, known: dict[int, Any]) -> Any:
    if not isinstance(thing, Number):
        return thing
    if thing.function is None:
        return known[id(thing)]
    return thing.function(*[_evaluated(each, known) for each in thing.inputs])
