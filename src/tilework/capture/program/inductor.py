"""Programs compiled by Inductor: it fuses local operators; all else is called in order.

The instructions become an FX graph. Everything other than plain operators (collectives, random
draws, calls of the core) becomes calls of one custom operator, which runs the instruction
unchanged. Each such call writes to a token, so that no compiler changes the order. Numbers become
tensors without dims.

Inductor lays out tensors as it likes. Memory whose layout or address matters is *pinned*: tensors
in it stay Python objects, which only unchanged instructions touch. Other operators read copies.
"""

from __future__ import annotations

import copy
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from tilework.capture.program.graph import ALIAS, ITEM, Expected, Graph, Hole, Instruction, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.number import Number
from tilework.capture.program.skeleton import has_hole
from tilework.capture.program.symbols import Symbols
from tilework.comm import provenance_digest
from tilework.comm.contract import Options
from tilework.errors import CaptureError

aten = torch.ops.aten
#: Held while a rank compiles: torch's compiler is not thread-safe.
_compiling = threading.Lock()

# Torch's cache keeps code that calls the operator: if the arguments get another meaning, the
# operator needs another name.
_library = torch.library.Library("tilework_capture", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "call(Tensor(a!)[] written, Tensor[] read, Tensor(b!) token, int number) -> ()"
)


class _Running(threading.local):
    """The calls of the program that this thread runs."""

    calls: Sequence[_Call] = ()


_running = _Running()


def _run_call(written: list[Tensor], read: list[Tensor], token: Tensor, number: int) -> None:
    _running.calls[number](written, read)


_library.impl("call", _run_call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("tilework_capture::call", lambda *_: None, lib=_library)


class _Direct(torch._ops.OpOverload):
    """The custom operator; compiled code calls it directly, without torch's dispatcher."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and args[2].__class__ is Tensor:
            return _running.calls[args[3]](args[0], args[1])
        return super().__call__(*args, **kwargs)


torch.ops.tilework_capture.call.default.__class__ = _Direct


class _Call:
    """An instruction that a compiled program calls unchanged, by the custom operator."""

    def __init__(
        self,
        each: Instruction,
        written: Sequence[Value],
        read: Sequence[Value],
        numbers: Sequence[Number],
        program: Compiled,
        digest: Callable[[], int] | None,
    ) -> None:
        self.function: Any = _waiting(each.function)
        self.args, self.kwargs, self.outputs = each.args, each.kwargs, each.outputs
        self.written = [value.number for value in written]
        self.read = [value.number for value in read]
        self.numbers, self.program, self.digest = list(numbers), program, digest
        #: The numbers of the objects that the instruction takes, and of those that end with it.
        self.taken: set[int] = set()
        self.last: list[int] = []
        self._run = self._lambda()

    def __call__(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        if self.digest is not None:
            provenance_digest.set_digest(self.digest())
        objects = self.program.objects
        result = self._run(written, read, objects, self.program.values)
        leaves = () if result is None else tree_leaves(result)
        for value, leaf in zip(self.outputs, leaves, strict=False):
            if value is None:
                continue
            if value.number in self.written:
                written[self.written.index(value.number)].copy_(leaf)
            else:
                objects[value.number] = leaf
        for number in self.last:
            objects.pop(number, None)

    def _lambda(self) -> Callable[..., Any]:
        """A function that calls the instruction's function with the arguments in place."""
        scope: dict[str, Any] = {"function": self.function}
        numbers = [id(number) for number in self.numbers]

        def text(thing: Any) -> str:
            if isinstance(thing, Value):
                if thing.number in self.written:
                    return f"w[{self.written.index(thing.number)}]"
                if thing.number in self.read:
                    return f"r[{self.read.index(thing.number)}]"
                self.taken.add(thing.number)
                return f"o[{thing.number}]"
            if isinstance(thing, Number):
                return f"r[{len(self.read) + numbers.index(id(thing))}].item()"
            if isinstance(thing, Hole):
                return f"k[{thing.number}]"
            if thing.__class__ in (list, tuple):
                parts = "".join([f"{text(each)}, " for each in thing])
                return f"[{parts}]" if thing.__class__ is list else f"({parts})"
            name = f"c{len(scope)}"
            scope[name] = thing
            return name

        args = [text(arg) for arg in self.args]
        args += [f"{key}={text(value)}" for key, value in self.kwargs.items()]
        name = "function"
        if isinstance(self.function, Hole):
            scope["waiting"], name = _waiting, f"waiting(k[{self.function.number}])"
        run: Callable[..., Any] = eval(f"lambda w, r, o, k: {name}({', '.join(args)})", scope)
        return run


def _waiting(function: Any) -> Any:
    """A function that waits for a collective, since the memory in a program could be reused."""
    if not isinstance(function, GroupCall) or function.is_point_to_point:
        return function
    opts = Options(function.opts.reduceOp, function.opts.rootRank, function.opts.timeout)
    return GroupCall(function.group, function.method, opts, function.others)


class Compiled:
    """A program that Inductor has compiled, once or for several sizes.

    Each call passes the numbers for ``options``. ``shared`` are the positions of inputs that share
    memory to which the program writes.
    """

    def __init__(
        self,
        graph: Graph,
        options: Sequence[Number],
        groups: Sequence[Any],
        shared: Sequence[int] = (),
    ) -> None:
        self.shared = shared
        self._digests: list[int] = [0] * len(groups)
        self._groups = list(groups)
        self.objects: dict[int, Any] = {}
        #: The constants in which records differ, in the call that runs.
        self.values: Sequence[Any] = ()
        self._calls: list[_Call] = []
        self._options = [torch.zeros((), dtype=torch.float64) for _ in options]
        self._known: tuple[Any, ...] = ()
        self._token = torch.zeros(1)
        self._count = len(graph.inputs)
        self._shapes = [each.value.shape for each in graph.inputs]
        #: Inputs whose shapes have holes: compiled programs take them contiguous. Where the program
        #: writes to such an input, a copy would not do.
        self._sized = [i for i, shape in enumerate(self._shapes) if has_hole(shape)]
        written = {id(memory) for each in graph.instructions for memory in each.writes}
        written -= (pinned := _pinned(graph, shared))
        self._written = [i for i in self._sized if id(graph.inputs[i].value.memory) in written]
        writer = _Writer(graph, options, self, pinned)
        self._module, self._holes = writer.module(), writer.holes
        #: The positions and numbers of pinned inputs.
        self._pinned = [
            (i, x.value.number) for i, x in enumerate(graph.inputs) if x.value in writer
        ]
        #: For each value that outlives a call, the number of the object; None: a tensor.
        self._kept = [value.number if value in writer else None for value in writer.kept]
        kept = set(self._kept)
        for call in reversed(self._calls):
            call.last = list(call.taken - kept)
            kept |= call.taken
        #: The compiled programs, each with the symbols for holes, and what holds for them.
        self._variants: list[tuple[Symbols, Callable[..., Any]]] = []

    def add_call(self, call: _Call) -> int:
        """Keep a call, and return the number by which the custom operator finds it."""
        self._calls.append(call)
        return len(self._calls) - 1

    def digest_of(self, group: Any, number: int) -> Callable[[], int]:
        """A function that gives the digest of a group's ``number``-th collective in a call."""
        place, digests = self._groups.index(group), self._digests
        return lambda: digests[place] + number

    def function_for(self, inputs: Sequence[Tensor], values: Sequence[Any]) -> Callable[..., Any]:
        """The program for inputs like these, with these constants; compiled now or before.

        It takes the inputs, the options and each group's digest; it returns the values that outlive
        the call. A CaptureError if it writes to an input that is not contiguous, of several shapes.
        """
        if not all(inputs[i].is_contiguous() for i in self._written):
            raise CaptureError("the program writes to an input that is not contiguous")
        function = next((made for held, made in self._variants if held.hold(values)), None)
        if function is None:
            symbols = Symbols(values)
            plain = [each.detach().as_subclass(Tensor) for each in inputs]
            examples: list[Any] = list(map(symbols.tensor, plain, self._shapes))
            examples += [symbols.at(number) for number in self._holes]
            examples += map(symbols.tensor, (*self._options, self._token))
            with symbols.tracing():
                function = _compile(self._module, examples, _sharing(plain))
            self._variants.append((symbols, function))
        sizes = [values[number] for number in self._holes]
        return partial(self._run, function, values, sizes)

    def _run(
        self, function: Callable[..., Any], values: Sequence[Any], sizes: Sequence[int], *args: Any
    ) -> list[Any]:
        count, options = self._count, self._options
        # Local tensors of other classes as plain ones, which is all that compiled code takes.
        inputs = [x if x.__class__ is Tensor else x.as_subclass(Tensor) for x in args[:count]]
        for i in self._sized:
            inputs[i] = inputs[i].contiguous()
        known = args[count : count + len(options)]
        if known != self._known or 0.0 in known:  # which equals -0.0
            for tensor, value in zip(options, known, strict=True):
                tensor.fill_(value)
            self._known = known
        self.values = values
        objects = self.objects
        for i, number in self._pinned:
            objects[number] = args[i]
        self._digests[:] = args[count + len(options) :]
        before, _running.calls = _running.calls, self._calls
        try:
            made = iter(function(*inputs, *sizes, *options, self._token))
            result = [next(made) if i is None else objects[i] for i in self._kept]
            return [*result, *[number.item() for number in made]]
        finally:
            _running.calls = before
            objects.clear()


def _sharing(inputs: Sequence[Tensor]) -> str:
    """The inputs that share a storage, for the key in torch's cache, which lacks this."""
    first: dict[int, int] = {}
    storages = [each.untyped_storage()._cdata for each in inputs]
    found = [first.setdefault(storage, i) for i, storage in enumerate(storages)]
    return str([(i, other) for i, other in enumerate(found) if other != i])


def _compile(module: GraphModule, examples: Sequence[Any], tag: str) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts functions there
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        cache_config: Any = import_module("torch.compiler.config")

    draws, key = config.patch(fallback_random=True), cache_config.patch(cache_key_tag=tag)
    with _compiling, torch.no_grad(), draws, key:
        while True:
            try:
                return compile_fx(copy.deepcopy(module), list(examples))  # type: ignore[return-value]
            except (ImportError, OSError) as error:
                # A killed compiler has left a partial library in the cache.
                broken = re.search(r"(/\S+\.so)", str(error))
                if broken is None or not Path(broken[1]).exists():
                    raise
                Path(broken[1]).unlink()


def _pinned(graph: Graph, shared: Sequence[int]) -> set[int]:
    """The ids of memory whose layout or address matters: inputs, messages, memory known by id."""
    memories = [graph.inputs[i].value.memory for i in shared]
    inputs = {each.value.number for each in graph.inputs}
    for each in graph.instructions:
        target = each.target
        is_unknown = each.name == ALIAS and each.args[0].number not in inputs
        if is_unknown or (isinstance(target, GroupCall) and target.is_point_to_point):
            memories += [value.memory for value in each.inputs()]
    return set(map(id, memories))


class _Writer:
    """Writes a program's instructions as an FX graph."""

    def __init__(
        self, graph: Graph, options: Sequence[Number], compiled: Compiled, pinned: set[int]
    ) -> None:
        self.graph, self.compiled, self._pinned = graph, compiled, pinned
        #: By id of pinned memory, and by number of a value: a copy as the value is now.
        self._copies: dict[int, dict[int, Node]] = {}
        #: The numbers of operations that send or receive messages.
        self._messages: set[int] = set()
        self.fx = FxGraph()
        self.nodes: dict[int, Node] = {}
        self._numbers: dict[int, Any] = {}
        self._constants: dict[str, Tensor] = {}
        self._counts: dict[Any, int] = {}
        for each in graph.inputs:
            self.nodes[each.value.number] = self.fx.placeholder(f"t{each.value.number}")
        #: The numbers of the holes that are parameters of the compiled program.
        self.holes = _sizes_in(graph)
        self._sizes = {number: self.fx.placeholder(f"k{number}") for number in self.holes}
        for i, option in enumerate(options):
            self._numbers[id(option)] = self.fx.placeholder(f"n{i}")
        self.token = self.fx.placeholder("token")
        #: The values that outlive a call.
        self.kept = list({value.number: value for value in graph.kept()}.values())

    def __contains__(self, value: Value) -> bool:
        """True if a value is in pinned memory."""
        return id(value.memory) in self._pinned

    def module(self) -> GraphModule:
        for value in [x.value for x in self.graph.inputs if x.value in self]:
            node = self.nodes[value.number]  # of pinned values the layout, which may change
            self.nodes[value.number] = self._op(aten.empty_like.default, node)
        for each in self.graph.instructions:
            self._write(each)
        numbers = [leaf for leaf in self.graph.result if isinstance(leaf, Number)]
        outputs = [self.nodes[value.number] for value in self.kept if value not in self]
        outputs += [self.number(number) for number in numbers]
        self.fx.output(tuple(outputs))
        self.fx.lint()
        root = torch.nn.Module()
        for name, constant in self._constants.items():
            root.register_buffer(name, constant)
        return GraphModule(root, self.fx)

    # -- instructions ------------------------------------------------------------------------

    def _write(self, each: Instruction) -> None:
        touched = {*map(id, each.writes), *[id(out.memory) for out in each.made]}
        is_pinned = not touched.isdisjoint(self._pinned)
        leaves = tree_leaves((each.args, each.kwargs))
        if each.kind == "wait" and each.args[0].number not in self._messages:
            return
        if is_pinned:
            self._call(each)
        elif each.kind == "call" and getattr(each.target, "__name__", "") in _EMPTY:
            self._make(each)
        elif each.kind != "operator":
            self._call(each)
        elif each.target is ITEM:
            node = self.node(each.args[0])
            self._outputs(each, self._op(aten._to_copy.default, node, dtype=torch.float64))
        elif not any(isinstance(leaf, Number) for leaf in leaves):
            self._operator(each)
        elif not self._with_numbers(each):
            self._call(each)

    def _operator(self, each: Instruction) -> None:
        given = each.args, each.kwargs
        args, kwargs = tree_map(self._argument, given, is_leaf=lambda x: isinstance(x, Hole))
        # Inductor may lay out a tensor in another way.
        is_view = each.target is aten.view.default
        function = aten.reshape.default if is_view else each.target
        self._outputs(each, self._op(function, *args, **kwargs))

    def _op(self, function: Any, *args: Any, **kwargs: Any) -> Node:
        return self.fx.call_function(function, args, kwargs)

    def _outputs(self, each: Instruction, node: Node) -> None:
        if each.form == "leaf":
            if each.outputs[0] is not None:
                self.nodes[each.outputs[0].number] = node
            return
        for i, out in enumerate(each.outputs):
            if out is not None:
                self.nodes[out.number] = self._op(operator.getitem, node, i)

    def node(self, value: Value) -> Node:
        """The node of a value; of a pinned value, that of a copy as it is now."""
        if value not in self:
            return self.nodes[value.number]
        copies = self._copies.setdefault(id(value.memory), {})
        node = copies.get(value.number)
        if node is None:
            node = self._op(aten.empty_like.default, self.nodes[value.number])
            copies[value.number] = node
            made, copy_ = replace(value, number=-value.number), aten.copy_.default
            each = Instruction(copy_, (made, value), {}, [], "leaf", (), "call", "", "copy_")
            self._emit(_Call(each, [made], [], [], self.compiled, None), [node], [])
        return node

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self.node(leaf)
        if isinstance(leaf, Hole):
            node = self._sizes.get(leaf.number)
            if node is None:
                raise CaptureError(f"sizes decide on {leaf.example!r}, which is no integer")
            return node
        if isinstance(leaf, Tensor):
            name = f"constant{len(self._constants)}"
            self._constants[name] = leaf
            return self.fx.get_attr(name)
        return leaf

    def _make(self, each: Instruction) -> None:
        """Make empty tensors for the outputs of an instruction."""
        for out in [out for out in each.made if out.memory is not None]:
            shape, about = list(map(self._argument, out.shape)), {"device": out.device}
            empty = self._op(aten.empty.memory_format, shape, dtype=out.dtype, **about)
            self.nodes[out.number] = empty

    def _call(self, each: Instruction) -> None:
        """Write a call of the custom operator, which runs the instruction unchanged."""
        values = self._loose(each.inputs())
        numbers = [x for x in tree_leaves((each.args, each.kwargs)) if isinstance(x, Number)]
        read = [value for value in values if value.memory not in each.writes]
        written = [value for value in values if value not in read]
        if isinstance(each.target, Expected):
            written += self._written_after(each)
        self._make(each)
        written += self._loose(each.made)
        call = _Call(each, written, read, numbers, self.compiled, self._digest_of(each))
        given = [*map(self.node, read), *map(self.number, numbers)]
        self._emit(call, list(map(self.node, written)), given)
        for memory in each.writes:
            self._copies.pop(id(memory), None)
        if torch.Tag.inplace_view in getattr(each.target, "tags", ()):
            args = map(self._argument, each.args[1:])
            self._op(each.target, self.nodes[each.args[0].number], *args)

    def _loose(self, values: Iterable[Value]) -> list[Value]:
        """The tensors among values that are not in pinned memory, each once."""
        found = {x.number: x for x in values if x.memory is not None and x not in self}
        return list(found.values())

    def _digest_of(self, each: Instruction) -> Callable[[], int] | None:
        """A function that gives the digest of a collective; None for another instruction."""
        call = each.target
        if not isinstance(call, GroupCall):
            return None
        number = self._counts[call.group] = self._counts.get(call.group, -1) + 1
        if call.is_point_to_point:
            self._messages |= {out.number for out in each.made}
        return self.compiled.digest_of(call.group, number)

    def _emit(self, call: _Call, written: list[Node], read: list[Node]) -> None:
        number = self.compiled.add_call(call)
        self._op(torch.ops.tilework_capture.call.default, written, read, self.token, number)

    def _written_after(self, each: Instruction) -> list[Value]:
        """The inputs to which later instructions write: no compiler moves the writes up."""
        later = self.graph.instructions[self.graph.instructions.index(each) + 1 :]
        memories = {id(memory) for x in later for memory in x.writes} - self._pinned
        values = [x.value for x in self.graph.inputs]
        return [value for value in values if id(value.memory) in memories]

    # -- numbers -----------------------------------------------------------------------------

    def number(self, number: Any) -> Any:
        """The node that has a program's number as a tensor without dims; others unchanged."""
        if isinstance(number, Value):
            return self.node(number)
        if isinstance(number, Hole):
            size = self._argument(number)
            return self._op(aten.scalar_tensor.default, size, dtype=torch.float64)
        if not isinstance(number, Number):
            return number
        known = self._numbers.get(id(number))
        if known is None:
            inputs = [self.number(each) for each in number.inputs]
            made = _ON_NUMBERS.get(number.function)  # None: the result of item()
            known = self._numbers[id(number)] = made(self, *inputs) if made else inputs[0]
        return known

    def _with_numbers(self, each: Instruction) -> bool:
        """Write an operator with Numbers as scalars; False if no form takes tensors."""
        packet = each.name.split(".")[1]
        in_place = packet.endswith("_")
        name = packet.rstrip("_") if in_place else packet
        args, kwargs = list(each.args), dict(each.kwargs)
        if name.startswith("_foreach_"):
            return self._foreach(each, name.removeprefix("_foreach_"), args, in_place)
        formula = _FORMULAS.get(name)
        if formula is None:
            return False
        leaves = [self.number(self._argument(x)) for x in args]
        node = formula(self, *leaves, **{key: self.number(x) for key, x in kwargs.items()})
        self._put(each.outputs[0], args[0], node, in_place)
        return True

    def _put(self, out: Value | None, target: Any, node: Node, in_place: bool) -> None:
        if in_place:
            self._op(aten.copy_.default, self.node(target), node)
        elif out is not None:  # a float64 tensor promotes tensors that a Python float does not
            self.nodes[out.number] = self._op(aten._to_copy.default, node, dtype=out.dtype)

    def _foreach(self, each: Instruction, name: str, args: list[Any], in_place: bool) -> bool:
        formula = _FORMULAS.get(name)
        if formula is None or each.kwargs:
            return False
        for i, target in enumerate(args[0]):
            of_item = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
            node = formula(self, *[self.number(self._argument(x)) for x in of_item])
            self._put(each.outputs[i] if not in_place else None, target, node, in_place)
        return True


def _sizes_in(graph: Graph) -> list[int]:
    """The numbers of the holes of a program that stand for integers."""
    found: dict[int, None] = {}

    def look(tree: Any) -> None:
        if isinstance(tree, Hole) and type(tree.example) is int:
            found[tree.number] = None
        elif isinstance(tree, Value):
            look(tree.shape)
        elif isinstance(tree, Number):
            look(tree.inputs)
        elif isinstance(tree, tuple | list):
            for each in tree:
                look(each)

    look([each.value for each in graph.inputs])
    for each in graph.instructions:
        look([*each.args, *each.kwargs.values(), *each.outputs])
    look(graph.result)
    return sorted(found)


def _scaled(writer: _Writer, x: Any, factor: Any) -> Any:
    return writer._op(aten.mul.Tensor, x, factor)


def _plus(function: Any) -> Callable[..., Node]:
    def formula(w: _Writer, x: Any, y: Any, alpha: Any = 1) -> Node:
        if not isinstance(alpha, Node) and alpha == 1:
            return w._op(function.Tensor, x, y)
        return w._op(function.Tensor, x, _scaled(w, y, alpha))

    return formula


def _plus_scaled(op: Any, w: _Writer, x: Any, y: Any, z: Any, value: Any = 1) -> Node:
    return w._op(aten.add.Tensor, x, _scaled(w, w._op(op, y, z), value))


def _difference(w: _Writer, x: Any, y: Any) -> Node:
    op = aten.sub.Tensor if isinstance(x, Node) else None
    return w._op(aten.rsub.Scalar, y, x) if op is None else w._op(op, x, y)


def _quotient(w: _Writer, x: Any, y: Any) -> Node:
    if isinstance(x, Node):
        return w._op(aten.div.Tensor, x, y)
    return w._op(aten.mul.Tensor, w._op(aten.reciprocal.default, y), x)


def _power(w: _Writer, x: Any, y: Any) -> Node:
    if not isinstance(x, Node):
        return w._op(aten.pow.Scalar, x, y)
    kind = aten.pow.Tensor_Tensor if isinstance(y, Node) else aten.pow.Tensor_Scalar
    return w._op(kind, x, y)


def _commuting(op: Any) -> Callable[..., Node]:
    return lambda w, x, y: w._op(op, x, y) if isinstance(x, Node) else w._op(op, y, x)


#: By Python function on numbers, the same function on tensors without dims.
_ON_NUMBERS: dict[Any, Callable[..., Node]] = {
    operator.add: _commuting(aten.add.Tensor),
    operator.mul: _commuting(aten.mul.Tensor),
    operator.sub: _difference,
    operator.truediv: _quotient,
    operator.pow: _power,
    operator.neg: lambda w, x: w._op(aten.neg.default, x),
    operator.abs: lambda w, x: w._op(aten.abs.default, x),
}
#: Functions that make a tensor without elements' values, as a group's buffer.
_EMPTY = ("empty", "empty_tensor")
#: By operator, the same operator with a tensor without dims for each number.
_FORMULAS: dict[str, Callable[..., Node]] = {
    "add": _plus(aten.add),
    "sub": _plus(aten.sub),
    "mul": lambda w, x, y: w._op(aten.mul.Tensor, x, y),
    "div": lambda w, x, y, **mode: w._op(
        aten.div.Tensor_mode if mode else aten.div.Tensor, x, y, **mode
    ),
    "addcdiv": partial(_plus_scaled, aten.div.Tensor),
    "addcmul": partial(_plus_scaled, aten.mul.Tensor),
    "lerp": lambda w, x, end, weight: _plus_scaled(aten.sub.Tensor, w, x, end, x, weight),
}
