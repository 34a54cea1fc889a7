"""The surroundings of a program: checks that it holds, reads of inputs, writes of results.

It is generated Python for one record, with a comparison of identities for each object among the
record's conditions: some 40 ns each. A loop over descriptions takes four times as long.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.capture.program.graph import Graph, Value
from tilework.capture.program.number import Number
from tilework.capture.program.place import Option, StatePlace, memory_layout_of
from tilework.dtensor import DTensor
from tilework.dtensor.internal import forget_grad, wrap_as

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)


class ProgramConditions(NamedTuple):
    """The conditions under which a recorded program may run, besides the layouts of inputs.

    Attributes:
        options: Floats of optimizers, such as learning rates, which are inputs and may change.
        way: The objects that lead to inputs: (place, object). The same object must be there.
        constants: Numbers, texts and flags that the step may have read: (place, value). The value
            must be equal, and of the same class.
        guards: Comparisons of options by the step: (function, arguments, recorded result). The
            result must be the same.
    """

    options: list[Option]
    way: list[tuple[StatePlace, Any]]
    constants: list[tuple[StatePlace, Any]]
    guards: list[tuple[Callable[..., Any], tuple[Any, ...], bool]]


class _Source:
    """A generated Python function: lines of code, and the objects that names in them mean."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"DTensor": DTensor, "wrap_as": wrap_as}
        self.lines: list[str] = []
        self._names: dict[int, str] = {}

    def name(self, thing: Any) -> str:
        """The name by which the code refers to an object."""
        if thing is None or thing is True or thing is False:
            return repr(thing)
        name = self._names.get(id(thing))
        if name is None:
            name = self._names[id(thing)] = f"c{len(self._names)}"
            self.scope[name] = thing
        return name

    def read(self, place: StatePlace) -> str:
        """A Python expression that reads a place."""
        if place.how == "item" and isinstance(place.owner, defaultdict):
            return f"{self.name(place.owner)}.get({self.key(place)})"  # makes no item
        return self.target(place)

    def key(self, place: StatePlace) -> str:
        """A Python expression for the key of an item."""
        return repr(place.key) if isinstance(place.key, str | int) else self.name(place.key)

    def target(self, place: StatePlace) -> str:
        """A Python expression that reads a place, or that a value can be assigned to."""
        owner = self.name(place.owner)
        if place.how in ("content", "layout"):
            return f"{self.name(place.get)}()"
        local = "._local_tensor" if place.owner.__class__ is DTensor else ""
        forms = {
            "item": lambda: f"{owner}[{self.key(place)}]",
            "cell": lambda: f"{owner}.cell_contents",
            "grad": lambda: f"{owner}{local}.grad",
            "address": lambda: f"{owner}{local}.data_ptr()",
            "length": lambda: f"len({owner})",
            "keys": lambda: f"tuple({owner})",
            "presence": lambda: f"({place.key!r} in {owner})",
            "attribute": lambda: f"{owner}.{place.key}",
        }
        return forms[place.how]()

    def function(self, name: str, parameter: str) -> Callable[..., Any]:
        """Compile the lines into a function of this name and these parameters."""
        text = f"def {name}({parameter}):\n" + "\n".join(f"    {line}" for line in self.lines)
        exec(_compiled(text, f"<{name} of a program>"), self.scope)
        function: Callable[..., Any] = self.scope[name]
        return function


@lru_cache(64)
def _compiled(text: str, file: str) -> types.CodeType:
    """The code of a text; records of one program mostly have one."""
    return compile(text, file, "exec")


def write_enter(graph: Graph, held: ProgramConditions) -> Callable[..., list[Tensor] | None]:
    """Make the function that runs before a program: it checks conditions and returns the inputs.

    It takes the leaves of the arguments. It returns None if a check fails; the record may hold
    nevertheless. It does not check layouts of inputs: :func:`layouts_hold` does.
    """
    source = _Source()
    checks = [f"{source.read(place)} is {source.name(thing)}" for place, thing in held.way]
    for number, (place, value) in enumerate(held.constants):
        checks += _checks_of(source, f"k{number}", place, value)
    inputs = []
    for number, each in enumerate(graph.inputs):
        path = each.path
        if each.is_argument:
            inputs.append(f"leaves[{path.number}]{'._local_tensor' * path.is_dtensor}")
            continue
        if each.may_change:
            inputs.append(f"v{number}")
            checks.append(f"(v{number} := {source.read(path)}) is not None")
            checks += [f"{source.read(other)} is v{number}" for other in each.others]
            continue
        tensor = source.name(each.tensor)
        inputs.append(tensor)
        checks.append(f"{source.read(path)} is {tensor}")
        if each.is_local:
            checks.append(f"{source.name(path.owner)}._spec is {source.name(each.layout)}")
    source.lines.append("try:")
    condition = " and ".join(f"({check})" for check in checks) or "True"
    source.lines.append(f"    if {condition}:")
    source.lines.append(f"        return [{', '.join(inputs)}]")
    source.lines.append("except (LookupError, AttributeError, TypeError, ValueError):")
    source.lines.append("    pass")
    source.lines.append("return None")
    return source.function("enter", "leaves")


def _checks_of(source: _Source, name: str, place: StatePlace, value: Any) -> Iterator[str]:
    """Conditions that a place holds a constant; ``name`` names the value found there."""
    if place.how == "length" and not value:
        yield f"not {source.name(place.owner)}"
    elif value is None or isinstance(value, bool):
        yield f"{source.read(place)} is {source.name(value)}"
    elif place.how in ("length", "content", "layout", "keys") or not isinstance(value, int | float):
        yield f"{source.read(place)} == {source.name(value)}"
    else:  # 2 == 2.0, 1 == True, 0.0 == -0.0
        yield f"({name} := {source.read(place)}) == {source.name(value)}"
        yield f"{name}.__class__ is {source.name(type(value))}"
        if not value and isinstance(value, float):
            yield f"repr({name}) == {repr(value)!r}"


def layouts_hold(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a function that checks later if tensors still have the layouts that they have now.

    It may return False for unchanged layouts if modes of torch, such as autocast, differ. Dynamo's
    guards take 0.07 µs a tensor, and comparisons in Python 0.4.
    """
    if _TensorGuards is None:
        known = list(map(memory_layout_of, tensors))
        return lambda *now: list(map(memory_layout_of, now)) == known
    sizes = [list(each.shape) for each in tensors]
    strides = [list(each.stride()) for each in tensors]
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check


def write_leave(
    graph: Graph, tree: Any, index_of: Callable[[Any], int]
) -> Callable[[list[Any]], Any]:
    """Make the function that runs after a program: it sets places, and returns the step's result.

    It takes the values that outlive the call; ``index_of`` gives the position of a value or number
    among them. ``tree`` is the structure of the step's result.
    """
    source = _Source()

    def text(leaf: Any) -> str:
        if isinstance(leaf, tuple) and leaf and leaf[0] == "dtensor":
            return f"wrap_as(DTensor, kept[{index_of(leaf[1])}], {source.name(leaf[2])}, {leaf[3]})"
        if isinstance(leaf, tuple) and leaf and leaf[0] == "as":
            return f"kept[{index_of(leaf[1])}].as_subclass({source.name(leaf[2])})"
        if isinstance(leaf, Value | Number):
            return f"kept[{index_of(leaf)}]"
        return source.name(leaf)

    for place, leaf in graph.places:
        source.lines.append(f"{source.target(place)} = {text(leaf)}")
        if place.how == "grad" and place.owner.__class__ is DTensor:
            source.lines.append(f"{source.name(forget_grad)}({source.name(place.owner)})")
    leaves = [text(leaf) for leaf in graph.result]
    if len(leaves) == 1 and tree == _LEAF:
        source.lines.append(f"return {leaves[0]}")
    else:
        unflatten, name = source.name(tree_unflatten), source.name(tree)
        source.lines.append(f"return {unflatten}([{', '.join(leaves)}], {name})")
    return source.function("leave", "kept")


_LEAF = tree_flatten(0)[1]
