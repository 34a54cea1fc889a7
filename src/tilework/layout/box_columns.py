"""Boxes as columns of numbers: queries about many boxes, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import add

from tilework.layout.box import Box, Ints
from tilework.layout.cuts import cover_by_cuts, first_free
from tilework.layout.overlap_search import find_pair
from tilework.layout.signed_corners import (
    Column,
    left_over_2d,
    nowhere_two_2d,
    signed_corners,
    strides_for,
)

#: The maximum of dims for corners, whose number doubles with each dim.
_MOST_CORNERED = 4


class BoxColumns:
    """The starts and the ends of many boxes, as a list of starts and a list of ends for each dim.

    Empty boxes are left out.
    """

    __slots__ = ("count", "ends", "positions", "starts")

    def __init__(self, offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
        ndims = {*map(len, offsets), *map(len, sizes)}
        if len(ndims) > 1 or len(offsets) != len(sizes):
            raise ValueError(
                f"boxes need as many offsets as sizes and one number of dims for all, got "
                f"{len(offsets)} offsets and {len(sizes)} sizes with {sorted(ndims)} dims"
            )
        flat_sizes = list(chain.from_iterable(sizes))
        #: The number, among the given boxes, of each entry.
        self.positions: Sequence[int] = range(len(sizes))
        if 0 in flat_sizes:
            self.positions = [i for i, box_sizes in enumerate(sizes) if 0 not in box_sizes]
            offsets = [offsets[i] for i in self.positions]
            flat_sizes = list(chain.from_iterable([sizes[i] for i in self.positions]))
        flat = list(chain.from_iterable(offsets))
        flat_ends = list(map(add, flat, flat_sizes))
        ndim = ndims.pop() if ndims else 0
        self.count = len(self.positions)
        self.starts: list[Column] = [flat[dim::ndim] for dim in range(ndim)]
        self.ends: list[Column] = [flat_ends[dim::ndim] for dim in range(ndim)]

    def cover(self, lows: Ints, highs: Ints) -> bool:
        """True if the boxes cover the box from ``lows`` to ``highs``, each element once."""
        if not self.count:
            return False
        around = tuple(map(min, self.starts)) == lows and tuple(map(max, self.ends)) == highs
        return around and self.cover_their_bounds()

    def cover_their_bounds(self) -> bool:
        """True if the boxes cover their bounding box, each element once."""
        starts, ends = self._differing()
        if not starts:
            return self.count == 1
        if len(starts) > _MOST_CORNERED:
            return cover_by_cuts(starts, ends)
        lows, highs = list(map(min, starts)), list(map(max, ends))
        strides = strides_for(lows, highs)
        plus, minus = signed_corners(starts, ends, strides)
        full_plus, full_minus = signed_corners([[x] for x in lows], [[x] for x in highs], strides)
        if len(starts) == 2:  # takes a third of the time
            return left_over_2d(plus, minus) == left_over_2d(full_plus, full_minus)
        return sorted(plus + full_minus) == sorted(minus + full_plus)

    def overlap(self) -> tuple[int, int] | None:
        """Two of the given boxes that overlap, the lower number first; None if no two do."""
        if self.count < 2 or self._corners_show_disjoint():
            return None
        pair = find_pair(list(zip(*self._differing(), strict=True)), self.count)
        if pair is None:
            return None
        i, j = sorted(self.positions[member] for member in pair)
        return i, j

    def _corners_show_disjoint(self) -> bool:
        """True if the boxes' corners prove that no two boxes overlap. False leaves it open.

        If the boxes differ in two dims, the proof succeeds whenever no two overlap. In any other
        number of dims it succeeds only if the boxes also fill their bounding box without a gap.
        """
        starts, ends = self._differing()
        if len(starts) != 2:
            return self.cover_their_bounds()
        low, high = min(starts[1]), max(ends[1])
        stride = high - low + 1
        left = left_over_2d(*signed_corners(starts, ends, [stride, 1]))
        return left is not None and nowhere_two_2d(left, stride, low)

    def first_gap(self, shape: Ints) -> Box:
        """A region of a tensor of this shape that no box covers any element of.

        The boxes must be within the shape and disjoint, and must not cover all of it.
        """
        if not self.count:
            return Box((0,) * len(shape), shape)
        return self._grow(first_free(self.starts, self.ends, shape), shape)

    def _grow(self, first: list[int], shape: Ints) -> Box:
        """The region without boxes that starts at the uncovered element ``first``.

        It is extended as far as possible in the last dim, then in the dim before, and so on.
        """
        ends = [at + 1 for at in first]
        for dim in reversed(range(len(shape))):
            ends[dim] = shape[dim]
            blocking = list(range(self.count))
            for low, high, starts, stops in zip(first, ends, self.starts, self.ends, strict=True):
                blocking = [i for i in blocking if starts[i] < high and stops[i] > low]
            ends[dim] = min([self.starts[dim][i] for i in blocking], default=shape[dim])
        return Box(tuple(first), tuple([end - at for at, end in zip(first, ends, strict=True)]))

    def differing_dims(self) -> list[int]:
        """The dims in which boxes differ."""
        spans = zip(self.starts, self.ends, strict=True)
        return [dim for dim, span in enumerate(spans) if not all(map(_is_constant, span))]

    def _differing(self) -> tuple[list[Column], list[Column]]:
        """The starts and ends in the differing dims."""
        dims = self.differing_dims()
        return [self.starts[dim] for dim in dims], [self.ends[dim] for dim in dims]


def _is_constant(column: Column) -> bool:
    return not column or column.count(column[0]) == len(column)
