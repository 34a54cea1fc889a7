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

from tilework.capture.program.graph import Graph, Input, Instruction, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.number import Number
from tilework.capture.program.place import Argument, StatePlace
from tilework.dtensor.spec import DTensorSpec, spec_of


class Different(Exception):
    """Two records differ in more than integers that depend on a size."""


class Size(NamedTuple):
    """An integer of a program that depends on the call's size.

    It is ``(factor * size + addend) / divisor``.
    """

    factor: int
    addend: int
    divisor: int

    def at(self, size: int) -> int:
        """The integer at a size.

        Raises:
            Different: The division leaves a rest at this size.
        """
        if not self.divides(size):
            raise Different(f"{self} at {size}")
        return (self.factor * size + self.addend) // self.divisor

    def divides(self, size: int) -> bool:
        """True if the division leaves no rest at a size: only then is the integer known."""
        return (self.factor * size + self.addend) % self.divisor == 0

    def text(self) -> str:
        """A Python expression of the variable ``size`` for the integer."""
        if self == (1, 0, 1):
            return "size"
        product = f"size * {self.factor}" if self.factor != 1 else "size"
        whole = f"{product} + {self.addend}" if self.addend else product
        return f"({whole}) // {self.divisor}" if self.divisor != 1 else f"({whole})"


@dataclass(eq=False)
class SizedSpec:
    """The layout of a DTensor whose shape depends on the size."""

    #: As from :func:`parts_of`, with a Size for each integer that depends on the size.
    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        self._known: dict[int, DTensorSpec] = {}

    def at(self, size: int) -> DTensorSpec:
        """The layout of the DTensor at a size."""
        spec = self._known.get(size)
        if spec is None:
            mesh, placements, order, shape, strides = self.parts
            spec = spec_of(mesh, placements, at(shape, size), order, at(strides, size))
            self._known[size] = spec
        return spec


def spec_at(spec: DTensorSpec | SizedSpec, size: int | None) -> DTensorSpec:
    """The layout at a size of a SizedSpec; any other layout unchanged."""
    return spec.at(size or 0) if isinstance(spec, SizedSpec) else spec


def has_size(tree: Any) -> bool:
    """True if some integer in a tree depends on the size."""
    if isinstance(tree, Size | SizedSpec):
        return True
    return isinstance(tree, tuple | list) and any(map(has_size, tree))


def size_of(pattern: Any, actual: Any) -> int | None:
    """The size in ``actual``: the integer where ``pattern`` has the size itself; None without."""
    if isinstance(pattern, Size):
        return actual if type(actual) is int and pattern == (1, 0, 1) else None
    if not isinstance(pattern, tuple | list) or not isinstance(actual, tuple | list):
        return None
    for left, right in zip(pattern, actual, strict=False):
        found = size_of(left, right)
        if found is not None:
            return found
    return None


def fits(pattern: Any, actual: Any, size: int) -> bool:
    """True if ``actual`` equals the pattern at a size. Never true of sizes below 2."""
    try:
        return size >= 2 and bool(at(pattern, size) == actual)
    except Different:
        return False


def at(tree: Any, size: int) -> Any:
    """A tree in which each Size is replaced by the integer at a size.

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
    """Makes one program for several sizes from two records of a step.

    Args:
        sizes: The size in the first record, and in the second.
    """

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        #: By number of a value of the first record, the number in the second, and the common value.
        self._values: dict[int, tuple[int, Value]] = {}
        #: By id of a number of the first record, the number in the second, and the common number.
        self._numbers: dict[int, tuple[Number, Number]] = {}

    def integer(self, left: int, right: int) -> Any:
        """An integer for both records: the same if they are equal, else a Size."""
        if left == right:
            return left
        first, second = self.sizes
        factor, divisor = right - left, second - first
        if divisor < 0:
            factor, divisor = -factor, -divisor
        common = gcd(factor, divisor)
        factor, divisor = factor // common, divisor // common
        return Size(factor, left * divisor - factor * first, divisor)

    def tree(self, left: Any, right: Any) -> Any:
        """An argument for both records, with a Size for each integer that differs.

        Raises:
            Different: They have no common form.
        """
        if type(left) is not type(right):
            raise Different(f"one record has {left!r}, the other {right!r}")
        if left is right:
            return left
        if type(left) is int:
            return self.integer(left, right)
        if isinstance(left, Value):
            number, common = self._values.get(left.number, (None, left))
            if number != right.number:
                raise Different("other operands")
            return common
        if isinstance(left, Number):
            return self._number(left, right)
        if isinstance(left, DTensorSpec):
            parts = self.tree(parts_of(left), parts_of(right))
            return left if parts == parts_of(left) else SizedSpec(parts)
        if isinstance(left, tuple | list):
            if len(left) != len(right):
                raise Different(f"{len(left)} and {len(right)} arguments")
            items = [self.tree(a, b) for a, b in zip(left, right, strict=True)]
            return items if isinstance(left, list) else tuple(items)
        alike = torch.equal(left, right) if isinstance(left, Tensor) else left == right
        if not alike:
            raise Different(f"{left!r} and {right!r}")
        return left

    def _number(self, left: Number, right: Number) -> Number:
        known = self._numbers.get(id(left))
        if known is None:
            if left.function is not right.function:
                raise Different("other numbers")
            common, inputs = left, self.tree(left.inputs, right.inputs)
            if left.function is not None:
                common = Number(left.value, left.function, inputs, left.book)
            known = self._numbers[id(left)] = right, common
        if known[0] is not right:
            raise Different("other numbers")
        return known[1]

    def graph(self, left: Graph, right: Graph) -> Graph:
        """A program for both records, with a Size for each integer that differs.

        Raises:
            Different: They have no common form.
        """
        if len(left.inputs) != len(right.inputs) or len(left.instructions) != len(
            right.instructions
        ):
            raise Different("another number of instructions")
        inputs = [self._input(a, b) for a, b in zip(left.inputs, right.inputs, strict=True)]
        instructions = [
            self._instruction(a, b)
            for a, b in zip(left.instructions, right.instructions, strict=True)
        ]
        if len(left.result) != len(right.result):
            raise Different("other results")
        result = [self._leaf(a, b) for a, b in zip(left.result, right.result, strict=True)]
        places = []
        if len(left.places) != len(right.places):
            raise Different("other places")
        for (place, leaf), (theirs, their_leaf) in zip(left.places, right.places, strict=True):
            if not same_place(place, theirs):
                raise Different(place.text)
            places.append((place, self._leaf(leaf, their_leaf)))
        return Graph(inputs, instructions, result, places)

    def _leaf(self, left: Any, right: Any) -> Any:
        """A leaf of the result for both records; digests of DTensors may differ."""
        if isinstance(left, tuple) and isinstance(right, tuple):
            return (*self.tree(left[:-1], right[:-1]), left[-1])
        return self.tree(left, right)

    def _input(self, left: Input, right: Input) -> Input:
        if not same_place(left.path, right.path):
            raise Different("other inputs")
        value = self._common_value(left.value, right.value)
        layout = left.layout if left.is_local else self.tree(left.layout, right.layout)
        others = zip(left.others, right.others, strict=False)
        if len(left.others) != len(right.others) or not all(same_place(*x) for x in others):
            raise Different("other inputs")
        return Input(value, left.path, left.tensor, layout, left.others)

    def _common_value(self, left: Value, right: Value) -> Value:
        number, common = self._values.get(left.number, (None, left))
        if number == right.number:
            return common
        if left.dtype != right.dtype:
            raise Different("other dtypes")
        common = replace(left, shape=self.tree(left.shape, right.shape))
        self._values[left.number] = right.number, common
        return common

    def _instruction(self, left: Instruction, right: Instruction) -> Instruction:
        mine, theirs = left.function, right.function
        if isinstance(mine, GroupCall) and isinstance(theirs, GroupCall):
            if (mine.group, mine.method, mine.opts) != (theirs.group, theirs.method, theirs.opts):
                raise Different("other collectives")
            if mine.others != theirs.others:
                raise Different("other collectives")
        elif mine is not theirs and mine != theirs:
            raise Different(f"{left.name} and {right.name}")
        if (left.form, len(left.outputs)) != (right.form, len(right.outputs)):
            raise Different("other results")
        args = self.tree(left.args, right.args)
        kwargs = {
            key: self.tree(value, their_value)
            for (key, value), their_value in zip(
                left.kwargs.items(), self._named(left, right), strict=True
            )
        }
        outputs: list[Value | None] = []
        for mine_out, their_out in zip(left.outputs, right.outputs, strict=True):
            if mine_out is None or their_out is None:
                if mine_out is not their_out:
                    raise Different("other results")
                outputs.append(None)
            else:
                outputs.append(self._common_value(mine_out, their_out))
        return replace(left, args=args, kwargs=kwargs, outputs=outputs)

    @staticmethod
    def _named(left: Instruction, right: Instruction) -> Iterator[Any]:
        if list(left.kwargs) != list(right.kwargs):
            raise Different("other keywords")
        yield from right.kwargs.values()


def integers_in(graph: Graph) -> list[int | Size]:
    """All integers of a program, in order: only in these, records of different sizes differ."""
    results = graph.result, [leaf for _, leaf in graph.places]
    inputs = [(each.value, each.layout) for each in graph.inputs]
    calls = [(each.args, list(each.kwargs.values()), each.outputs) for each in graph.instructions]
    return list(_integers((inputs, calls, results)))


def _integers(tree: Any) -> Iterator[int | Size]:
    if isinstance(tree, Size) or type(tree) is int:
        yield tree
    elif isinstance(tree, SizedSpec):
        yield from _integers(tree.parts)
    elif isinstance(tree, Value):
        yield from _integers(tree.shape)
    elif isinstance(tree, Number):
        yield from _integers(tree.inputs)
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _integers(each)


def parts_of(spec: DTensorSpec) -> tuple[Any, ...]:
    """The mesh, placements, order, shape and strides of a layout, to compare integers in them."""
    return spec.mesh, spec.placements, spec.order, tuple(spec.shape), spec.strides


def same_place(left: StatePlace | Argument, right: StatePlace | Argument) -> bool:
    """True if two places are the same part of the same object, or the same argument."""
    if isinstance(left, Argument) or isinstance(right, Argument):
        both = isinstance(left, Argument) and isinstance(right, Argument)
        return both and (left.number, left.is_dtensor) == (right.number, right.is_dtensor)  # type: ignore[union-attr]
    return left.owner is right.owner and left.how == right.how and left.key == right.key


def comparable(key: Any) -> Any:
    """The key of a call with each DTensorSpec taken apart by :func:`parts_of`."""
    if isinstance(key, DTensorSpec):
        return parts_of(key)
    return tuple(map(comparable, key)) if isinstance(key, tuple) else key


def first_difference(left: Any, right: Any) -> tuple[int, int] | None:
    """The first pair of integers in which two signatures differ; None if no integer differs."""
    if type(left) is not type(right):
        return None
    if isinstance(left, tuple):
        for a, b in zip(left, right, strict=False):
            found = first_difference(a, b)
            if found is not None:
                return found
    return (left, right) if type(left) is int and left != right else None
