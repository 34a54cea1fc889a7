"""The part that records of a step at several sizes share: everything but the constants.

Two records with equal skeletons run by one program, in which the constants that differ are
parameters (:class:`~tilework.capture.program.graph.Hole`). Each record has constants of a genuine
call: no constant is computed from a size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilework.capture.program.graph import Expected, Graph, Hole, Instruction, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.number import Number
from tilework.capture.program.place import Option
from tilework.dtensor.internal import DTensorSpec


@dataclass(eq=False, slots=True)
class Skeleton:
    """A program taken apart: what all records share, in order, and the constants."""

    tokens: list[Any]
    constants: list[Any]

    def fits(self, other: Skeleton) -> bool:
        """True if both differ in constants alone."""
        return len(self.constants) == len(other.constants) and self.tokens == other.tokens

    def differing(self, other: Skeleton) -> set[int]:
        """The positions of the constants in which both differ."""
        pairs = zip(self.constants, other.constants, strict=True)
        return {i for i, (mine, theirs) in enumerate(pairs) if not _same(mine, theirs)}


def take_apart(graph: Graph, options: Sequence[Option]) -> Skeleton:
    """The skeleton of a program, with the constants."""
    walk = _Walk(options)
    walk.graph(graph)
    return Skeleton(walk.tokens, walk.constants)


def with_holes(graph: Graph, options: Sequence[Option], holes: Sequence[int]) -> Graph:
    """The program with a :class:`Hole` for each constant at the positions in ``holes``."""
    return _Walk(options, {position: i for i, position in enumerate(holes)}).graph(graph)


def has_hole(tree: Any) -> bool:
    """True if a tree of tuples and lists holds a :class:`Hole`."""
    if isinstance(tree, tuple | list):
        return any(map(has_hole, tree))
    return isinstance(tree, Hole)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, float):  # 0.0 equals -0.0, and NaN equals nothing
        return repr(one) == repr(other)
    if isinstance(one, GroupCall):
        return bool(one.others == other.others)
    return bool(one.value == other.value if isinstance(one, Expected) else one == other)


class _Walk:
    """Goes through a program in one order: notes tokens and constants, and makes a copy."""

    def __init__(self, options: Sequence[Option], holes: dict[int, int] | None = None) -> None:
        self.tokens: list[Any] = [len(options)]
        self.constants: list[Any] = []
        self._holes = holes or {}
        self._values: dict[int, Value] = {}
        self._memories: dict[int, int] = {id(None): -1}
        self._numbers: dict[int, tuple[int, Number]] = {
            id(each.number): (i, each.number) for i, each in enumerate(options)
        }
        self._kinds: dict[type, Callable[[Any], Any]] = {
            Value: self._value,
            Number: self._number,
            tuple: self._sequence,
            list: self._sequence,
            torch.Size: self._sequence,
            **dict.fromkeys((int, float, Tensor, DTensorSpec), self._constant),
        }

    def graph(self, graph: Graph) -> Graph:
        """Go through a program, and return the copy."""
        inputs = [replace(each, value=self._value(each.value)) for each in graph.inputs]
        instructions = [self._instruction(each) for each in graph.instructions]
        result = [self._leaf(leaf) for leaf in graph.result]
        places = [(place, self._leaf(leaf)) for place, leaf in graph.places]
        self.tokens.append(graph.has_grad_mode)
        return Graph(inputs, instructions, result, places, graph.has_grad_mode)

    def _tree(self, thing: Any) -> Any:
        kind = self._kinds.get(thing.__class__)
        if kind is None:
            kind = self._constant if isinstance(thing, Tensor) else self._token
        return kind(thing)

    def _token(self, thing: Any) -> Any:
        self.tokens.append(thing)
        return thing

    def _constant(self, thing: Any) -> Any:
        self.tokens.append(thing.__class__)
        self.constants.append(thing)
        number = self._holes.get(len(self.constants) - 1)
        return thing if number is None else Hole(number, thing)

    def _sequence(self, thing: Any) -> Any:
        self.tokens.append((thing.__class__, len(thing)))
        items = [self._tree(each) for each in thing]
        return items if thing.__class__ is list else tuple(items)

    def _leaf(self, leaf: Any) -> Any:
        """A leaf of the result. Digests of DTensors may differ, and are no part of the program."""
        if isinstance(leaf, tuple) and leaf and leaf[0] == "dtensor":
            return (*self._tree(leaf[:-1]), leaf[-1])
        return self._tree(leaf)

    def _value(self, value: Value) -> Value:
        known = self._values.get(value.number)
        if known is not None:
            self.tokens.append(known.number)
            return known
        memory = self._memories.setdefault(id(value.memory), len(self._memories) - 1)
        self.tokens += [value.dtype, value.device, memory]
        shape = value.shape if value.memory is None else self._sequence(value.shape)
        made = replace(value, shape=shape, number=len(self._values) + 1)
        self._values[value.number] = made
        return made

    def _number(self, number: Number) -> Number:
        known = self._numbers.get(id(number))
        if known is not None:
            self.tokens.append(("number", known[0]))
            return known[1]
        self.tokens.append(("number of", number.function))
        inputs = self._sequence(number.inputs)
        made = Number(number.value, number.function, inputs, number.book)
        self._numbers[id(number)] = len(self._numbers), made
        return made

    def _instruction(self, each: Instruction) -> Instruction:
        function: Any = each.function
        if isinstance(function, GroupCall):
            about = function.group, function.method, function.opts, function.is_async
            self.tokens += about
            function = self._constant(function)
        elif isinstance(function, Expected):
            self.tokens.append(function.func)
            function = self._constant(function)
        else:
            self.tokens.append(function)
        self.tokens += [each.form, len(each.outputs), *each.kwargs]
        args = self._sequence(each.args)
        kwargs = {key: self._tree(value) for key, value in each.kwargs.items()}
        outputs = [None if out is None else self._value(out) for out in each.outputs]
        self.tokens.append([out is None for out in outputs])
        return replace(each, function=function, args=args, kwargs=kwargs, outputs=outputs)
