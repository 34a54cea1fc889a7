"""A program for several sizes: integers of two records that depend on a size.

Two records of a step at two sizes have the same instructions, except for some integers. Each such
integer is taken for ``a * size + c``, which two records determine; a third size checks. If records
differ in more than integers, each size has a separate record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.capture.graph import Graph, Input, Instruction, Value
from tilework.capture.group_calls import GroupCall
from tilework.capture.number import Number
from tilework.capture.places import Argument, Place
from tilework.dtensor.spec import DTensorSpec, spec_of


class Different(Exception):
    """Two records differ in more than integers."""


class Size(NamedTuple):
    """An integer that depends on the size: ``(factor * size + addend) / divisor``."""

    factor: int
    addend: int
    divisor: int

    def at(self, size: int) -> int:
        """The integer at a size.

        Raises:
            Different: It is not an integer there.
        """
        result, rest = divmod(self.factor * size + self.addend, self.divisor)
        if rest:
            raise Different(f"{self} at {size}")
        return result

    def text(self) -> str:
        """Python code for the integer, with a variable ``size``."""
        if self == (1, 0, 1):
            return "size"
        product = f"size * {self.factor}" if self.factor != 1 else "size"
        whole = f"{product} + {self.addend}" if self.addend else product
        return f"({whole}) // {self.divisor}" if self.divisor != 1 else f"({whole})"


@dataclass(eq=False)
class SizedSpec:
    """The layout of a DTensor whose shape depends on the size."""

    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        self._known: dict[int, DTensorSpec] = {}

    def at(self, size: int) -> DTensorSpec:
        """The layout at a size."""
        spec = self._known.get(size)
        if spec is None:
            mesh, placements, order, shape, strides = self.parts
            spec = spec_of(mesh, placements, at(shape, size), order, at(strides, size))
            self._known[size] = spec
        return spec


def has_size(tree: Any) -> bool:
    """True if an integer of a tree depends on the size."""
    if isinstance(tree, Size | SizedSpec):
        return True
    return isinstance(tree, tuple | list) and any(map(has_size, tree))


def size_of(pattern: Any, actual: Any) -> int | None:
    """The size in a call's signature, found by a pattern; None: the pattern has no size."""
    if isinstance(pattern, Size):
        return actual if type(actual) is int and pattern == (1, 0, 1) else None
    if not isinstance(pattern, tuple | list) or not isinstance(actual, tuple | list):
        return None
    for one, other in zip(pattern, actual, strict=False):
        found = size_of(one, other)
        if found is not None:
            return found
    return None


def fits(pattern: Any, actual: Any, size: int) -> bool:
    """True if a signature fits a pattern at a size. Sizes below 2 are special cases."""
    try:
        return size >= 2 and bool(at(pattern, size) == actual)
    except Different:
        return False


def at(tree: Any, size: int) -> Any:
    """A tree with the integers at a size.

    Raises:
        Different: An integer of the tree has no value at the size.
    """
    if isinstance(tree, Size):
        return tree.at(size)
    if isinstance(tree, SizedSpec):
        return tree.at(size)
    if tree.__class__ in (tuple, list, torch.Size):
        return type(tree)([at(each, size) for each in tree])
    return tree


class Unifier:
    """Unifies two records of a step.

    Args:
        sizes: The sizes in the two records.
    """

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        #: By number of a value of the first record, the number in the second.
        self._values: dict[int, int] = {}
        self._numbers: dict[int, Number] = {}

    def integer(self, one: int, other: int) -> Any:
        """The common form of two integers; a Size where they differ."""
        if one == other:
            return one
        first, second = self.sizes
        factor, divisor = other - one, second - first
        if divisor < 0:
            factor, divisor = -factor, -divisor
        common = gcd(factor, divisor)
        factor, divisor = factor // common, divisor // common
        return Size(factor, one * divisor - factor * first, divisor)

    def tree(self, one: Any, other: Any) -> Any:
        """The common form of two arguments.

        Raises:
            Different: They have no common form.
        """
        if type(one) is not type(other):
            raise Different(f"{one!r} and {other!r}")
        if one is other:
            return one
        if type(one) is int:
            return self.integer(one, other)
        if isinstance(one, Value):
            if self._values.get(one.number) != other.number:
                raise Different("other operands")
            return one
        if isinstance(one, Number):
            return self._number(one, other)
        if isinstance(one, DTensorSpec):
            parts = self.tree(parts_of(one), parts_of(other))
            return one if parts == parts_of(one) else SizedSpec(parts)
        if isinstance(one, tuple | list):
            if len(one) != len(other):
                raise Different(f"{len(one)} and {len(other)} arguments")
            items = [self.tree(a, b) for a, b in zip(one, other, strict=True)]
            return items if isinstance(one, list) else tuple(items)
        alike = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        if not alike:
            raise Different(f"{one!r} and {other!r}")
        return one

    def _number(self, one: Number, other: Number) -> Number:
        known = self._numbers.get(id(one))
        if known is None:
            if one.function is not other.function:
                raise Different("other numbers")
            self.tree(one.inputs, other.inputs)
            self._numbers[id(one)] = other
        elif known is not other:
            raise Different("other numbers")
        return one

    def graph(self, one: Graph, other: Graph) -> Graph:
        """The common form of two programs.

        Raises:
            Different: They have no common form.
        """
        if len(one.inputs) != len(other.inputs) or len(one.instructions) != len(other.instructions):
            raise Different("another number of instructions")
        inputs = [self._input(a, b) for a, b in zip(one.inputs, other.inputs, strict=True)]
        instructions = [
            self._instruction(a, b)
            for a, b in zip(one.instructions, other.instructions, strict=True)
        ]
        result = self.tree(one.result, other.result)
        places = []
        if len(one.places) != len(other.places):
            raise Different("other places")
        for (place, leaf), (theirs, their_leaf) in zip(one.places, other.places, strict=True):
            if not same_place(place, theirs):
                raise Different(place.text)
            places.append((place, self.tree(leaf, their_leaf)))
        return Graph(inputs, instructions, result, places)

    def _input(self, one: Input, other: Input) -> Input:
        if not same_place(one.path, other.path):
            raise Different("other inputs")
        self._same_value(one.value, other.value)
        layout = one.layout if one.is_local else self.tree(one.layout, other.layout)
        return Input(one.value, one.path, one.tensor, layout)

    def _same_value(self, one: Value, other: Value) -> None:
        if one.dtype != other.dtype:
            raise Different("other dtypes")
        self._values[one.number] = other.number

    def _instruction(self, one: Instruction, other: Instruction) -> Instruction:
        mine, theirs = one.function, other.function
        if isinstance(mine, GroupCall) and isinstance(theirs, GroupCall):
            if (mine.group, mine.method, mine.opts) != (theirs.group, theirs.method, theirs.opts):
                raise Different("other collectives")
            if mine.others != theirs.others:
                raise Different("other collectives")
        elif mine is not theirs and mine != theirs:
            raise Different(f"{one.name} and {other.name}")
        if (one.form, len(one.outputs)) != (other.form, len(other.outputs)):
            raise Different("other results")
        args = self.tree(one.args, other.args)
        kwargs = {
            key: self.tree(value, their_value)
            for (key, value), their_value in zip(
                one.kwargs.items(), self._named(one, other), strict=True
            )
        }
        for mine_out, their_out in zip(one.outputs, other.outputs, strict=True):
            if (mine_out is None) != (their_out is None):
                raise Different("other results")
            if mine_out is not None and their_out is not None:
                self._same_value(mine_out, their_out)
        return replace(one, args=args, kwargs=kwargs)

    @staticmethod
    def _named(one: Instruction, other: Instruction) -> Iterator[Any]:
        if list(one.kwargs) != list(other.kwargs):
            raise Different("other keywords")
        yield from other.kwargs.values()


def parts_of(spec: DTensorSpec) -> tuple[Any, ...]:
    """The parts of a layout, whose integers can be compared."""
    return spec.mesh, spec.placements, spec.order, tuple(spec.shape), spec.strides


def same_place(one: Place | Argument, other: Place | Argument) -> bool:
    """True if two places are the same."""
    if isinstance(one, Argument) or isinstance(other, Argument):
        both = isinstance(one, Argument) and isinstance(other, Argument)
        return both and (one.number, one.is_dtensor) == (other.number, other.is_dtensor)  # type: ignore[union-attr]
    return one.owner is other.owner and one.how == other.how and one.key == other.key


def comparable(key: Any) -> Any:
    """The key of a call with layouts in parts."""
    if isinstance(key, DTensorSpec):
        return parts_of(key)
    return tuple(map(comparable, key)) if isinstance(key, tuple) else key


def first_difference(one: Any, other: Any) -> tuple[int, int] | None:
    """The first integers in which two signatures of calls differ."""
    if type(one) is not type(other):
        return None
    if isinstance(one, tuple):
        for a, b in zip(one, other, strict=False):
            found = first_difference(a, b)
            if found is not None:
                return found
    return (one, other) if type(one) is int and one != other else None
