"""The factors that two shapes of one tensor have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilework.tiled.factors import Dim, Factor


def regrouped(old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """The factors of the dims of two shapes of one tensor, whose elements keep their order.

    Dims are split and merged from the outermost on, as far as sizes have common factors. A factor
    without a counterpart is unshardable.

    Example:
        >>> regrouped((6, 4, 5), (3, 8, 5))
        ([(d0=3, d1=2), (d2=4,), (d3=5,)], [(d0=3,), (d1=2, d2=4), (d3=5,)])
        >>> regrouped((4, 3), (6, 2))
        ([(d0=2, rest=2!), (rest=3!,)], [(d0=2, rest=3!), (rest=2!,)])
    """
    if 0 in old:
        return _without_elements(old, new)
    befores, afters = _Side(old), _Side(new)
    count = 0
    while befores.advance(afters):
        common = math.gcd(befores.rest, afters.rest)
        if common == 1 and befores.rest != afters.rest:
            _take_unshardable(befores, afters)
            continue
        factor = Factor(common, f"d{count}", reduce_op=None)
        count += 1
        befores.take(factor)
        afters.take(factor)
    return befores.dims, afters.dims


class _Side:
    """The dims of one shape, as far as their factors are known."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.dims: list[Dim] = []
        #: The rest of the size of the current dim; 0 if there is none.
        self.rest = 0
        self._next()

    def _next(self) -> None:
        at = len(self.dims)
        self.rest = self.sizes[at] if at < len(self.sizes) else 0
        if self.rest:
            self.dims.append(())

    def take(self, factor: Factor) -> None:
        """Add a factor to the current dim."""
        self.dims[-1] = (*self.dims[-1], factor)
        self.rest //= factor.size
        if self.rest == 1:
            self._next()

    def advance(self, other: _Side) -> bool:
        """Skip dims of size 1 that the other side lacks; True if any dims are left after that."""
        for one, second in ((self, other), (other, self)):
            while one.rest == 1 and second.rest != 1:
                one._next()
        return self.rest != 0


def _take_unshardable(befores: _Side, afters: _Side) -> None:
    """Take unshardable factors until both sides have the same number of elements."""
    had, gets = _take_rest(befores), _take_rest(afters)
    while had != gets:
        if had < gets:
            had *= _take_rest(befores)
        else:
            gets *= _take_rest(afters)


def _take_rest(side: _Side) -> int:
    """Make the rest of the current dim an unshardable factor, and return the factor's size."""
    size = side.rest
    side.take(Factor(size, "rest", unshardable=True))
    return size


def _without_elements(old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Factors of shapes without elements: equal first dims share them, others are unshardable."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    factors: list[Dim] = [
        (Factor(size, f"d{i}", reduce_op=None),) for i, size in enumerate(old[:same])
    ]
    return (
        factors + [(Factor(size, "rest", unshardable=True),) for size in old[same:]],
        factors + [(Factor(size, "rest", unshardable=True),) for size in new[same:]],
    )
