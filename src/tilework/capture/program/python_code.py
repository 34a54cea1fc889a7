"""Programs as Python: straight-line code that calls each operator with local tensors."""

from __future__ import annotations

import linecache
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from math import isfinite
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tilework.capture.program.graph import Graph, Hole, Input, Instruction, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.number import Number
from tilework.capture.program.place import Argument, Option
from tilework.capture.program.same_program import digest_offsets
from tilework.comm import provenance_digest
from tilework.comm.operations.internal import span
from tilework.dtensor import DTensor

_SYMBOLS: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.pow: "**",
}
_PLAIN = (bool, int, str, type(None))


@dataclass(frozen=True)
class PythonCode:
    """A program as a Python function.

    Attributes:
        run: The function. It takes the inputs, the constants in which records differ, the options,
            and for each group the digest of the call, and returns the values that outlive the call.
        text: The source of the function.
        kept: The values that ``run`` returns, in order; numbers of the result follow them.
        file: The name of the source in tracebacks.
    """

    run: Callable[..., list[Any]]
    text: str
    kept: list[Value]
    file: str


class _Writer:
    def __init__(
        self, graph: Graph, options: Sequence[Number], name: str, with_spans: bool
    ) -> None:
        self.graph, self.name, self.with_spans = graph, name, with_spans
        self.scope: dict[str, Any] = {"provenance": provenance_digest.set_digest, "span": span}
        self.lines: list[str] = []
        self._numbers: dict[int, str] = {id(each): f"n{i}" for i, each in enumerate(options)}
        self._bound: dict[int, str] = {}
        self.options = options

    def bind(self, thing: Any, prefix: str) -> str:
        """The name by which the code refers to an object that has no literal."""
        name = self._bound.get(id(thing))
        if name is None:
            number = 1
            name = prefix if prefix not in ("c", "f") else f"{prefix}0"
            while name in self.scope or iskeyword(name):
                number += 1
                name = f"{prefix}_{number}"
            self._bound[id(thing)] = name
            self.scope[name] = thing
        return name

    def number(self, number: Number) -> str:
        """The variable that has a number; adds a line that computes the number, if it is new."""
        name = self._numbers.get(id(number))
        if name is None:
            inputs = [
                self.number(x) if isinstance(x, Number) else self.expression(x)
                for x in number.inputs
            ]
            name = self._numbers[id(number)] = f"x{len(self._numbers)}"
            symbol = _SYMBOLS.get(number.function)
            if symbol is not None:
                text = f"{inputs[0]} {symbol} {inputs[1]}"
            elif number.function is operator.neg:
                text = f"-{inputs[0]}"
            elif len(inputs) == 1 and isinstance(number.inputs[0], Value):
                text = inputs[0]
            else:
                text = f"{self.bind(number.function, 'f')}({', '.join(inputs)})"
            self.lines.append(f"{name} = {text}")
        return name

    def expression(self, thing: Any) -> str:  # noqa: PLR0911
        """The Python expression for an argument of an instruction."""
        if isinstance(thing, Value):
            return f"t{thing.number}"
        if isinstance(thing, float):
            if isinstance(thing, Number):
                name = self.number(thing)
                return name if type(thing.value) is float else f"float({name})"
            return repr(thing) if isfinite(thing) else f"float({str(thing)!r})"
        if isinstance(thing, _PLAIN):
            return repr(thing)
        if isinstance(thing, Hole):
            return f"k{thing.number}"
        if thing.__class__ in (list, tuple, torch.Size):
            parts = [self.expression(each) for each in thing]
            if thing.__class__ is list:
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if isinstance(thing, torch.dtype):
            return self.bind(thing, str(thing).removeprefix("torch."))
        return self.bind(thing, "c")

    def call(self, each: Instruction) -> str:
        function: Any = each.function
        if isinstance(function, Hole):
            name = self.expression(function)
        elif isinstance(function, torch._ops.OpOverload):
            name = self.bind(function._op, each.name.split(".")[1])
        else:
            given = function.method if isinstance(function, GroupCall) else each.name
            name = self.bind(function, given if given.isidentifier() else "call")
        args = [self.expression(arg) for arg in each.args]
        args += [f"{key}={self.expression(value)}" for key, value in each.kwargs.items()]
        return f"{name}({', '.join(args)})"

    def instruction(self, each: Instruction, dead: Sequence[Value]) -> None:
        """Add the line of an instruction, after which the values in ``dead`` are not needed."""
        text, target = self.call(each), ""
        if each.made:
            target = ", ".join([f"t{out.number}" if out else "_" for out in each.outputs])
            if each.form == "deep":
                text = f"{self.bind(tree_leaves, 'leaves')}({text})"
            target += ", = " if each.form != "leaf" and len(each.outputs) == 1 else " = "
        if dead:
            text += "; del " + ", ".join([f"t{value.number}" for value in dead])
        before = f"with span({_title(each)!r}): " if self.with_spans else ""
        self.lines.append(f"{before}{target}{text}{_comment(each)}")


def write(
    graph: Graph, options: Sequence[Option], name: str, holes: int = 0, with_spans: bool = False
) -> PythonCode:
    """Write a program as a Python function, and compile the function.

    ``holes`` is the number of constants in which records differ; ``with_spans`` names each
    instruction in the rank's trace.
    """
    name = name if name.isidentifier() and not iskeyword(name) else "program"
    writer = _Writer(graph, [option.number for option in options], name, with_spans)
    groups = groups_of(graph)
    offsets = digest_offsets(graph)
    for each, dead, offset in zip(graph.instructions, graph.last_uses(), offsets, strict=True):
        if isinstance(each.target, GroupCall):
            writer.lines.append(f"provenance(d{groups.index(each.target.group)} + {offset})")
        writer.instruction(each, dead)
    kept = list({value.number: value for value in graph.kept()}.values())
    numbers = [
        writer.number(leaf) for leaf in tree_leaves(graph.result) if isinstance(leaf, Number)
    ]
    returned = ", ".join([f"t{value.number}" for value in kept] + numbers)
    parameters = [f"t{each.value.number}" for each in graph.inputs]
    parameters += [f"k{i}" for i in range(holes)]
    parameters += [f"n{i}" for i in range(len(options))] + [f"d{i}" for i in range(len(groups))]
    body = [*_header(graph, options, groups), *writer.lines, f"return [{returned}]"]
    text = f"def {name}({', '.join(parameters)}):\n" + "\n".join(f"    {line}" for line in body)
    # In the folder of the library: errors then name the line that called the program.
    file = os.path.join(
        os.path.dirname(__file__), f"<{name} at {id(graph):x}{' traced' * with_spans}>"
    )
    exec(compile(text, file, "exec"), writer.scope)
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    return PythonCode(writer.scope[name], text, kept, file)


def _header(graph: Graph, options: Sequence[Option], groups: Sequence[Any]) -> list[str]:
    """The comments that say what each parameter of the function is."""
    lines = [f"# t{each.value.number}: {_described(each)}" for each in graph.inputs]
    lines += [f"# n{i}: {option.text}" for i, option in enumerate(options)]
    return lines + [
        f"# d{i}: the digest of this call for ranks {list(group.global_ranks)}"
        for i, group in enumerate(groups)
    ]


def _described(each: Input) -> str:
    path = each.path
    if isinstance(path, Argument):
        return f"argument {path.number}, {each.value.text}"
    if path.owner.__class__ is DTensor:
        return f"{path.text}, {path.owner!r}"
    return f"{path.text}, {each.value.text}"


def groups_of(graph: Graph) -> list[Any]:
    """The groups of a program's collectives, in the order in which digests are passed."""
    groups: list[Any] = []
    for each in graph.instructions:
        if isinstance(each.target, GroupCall) and each.target.group not in groups:
            groups.append(each.target.group)
    return groups


def _comment(each: Instruction) -> str:
    shown = [out.text for out in each.made if out.text]
    if isinstance(each.target, GroupCall):
        shown.append(f"{each.target.text()}, {each.nbytes} bytes")
    parts = [*shown[:3], *(["…"] if len(shown) > 3 else []), _short(each.site)]
    return "  # " + "; ".join(part for part in parts if part)


def _title(each: Instruction) -> str:
    """The name of an instruction in a trace: the operator, and the line that called it."""
    name = each.name.split(".")[1] if each.name.startswith("aten.") else each.name
    return f"{name} {_short(each.site)}".strip()


def _short(site: str) -> str:
    place, _, _ = site.partition(" in ")
    return place.rsplit("/", 1)[-1]
