"""Boxes as columns of numbers: queries about many boxes, without an object for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, cycle, repeat
from operator import add, mul, sub

from tilework.layout.box import Box, Ints

#: The starts of all boxes in one dim, or their ends.
Column = list[int]


def strides_for(lows: list[int], highs: list[int]) -> list[int]:
    """Strides with which all points between ``lows`` and ``highs`` have different numbers."""
    strides = [1]
    for low, high in zip(reversed(lows[1:]), reversed(highs[1:]), strict=True):
        strides.append(strides[-1] * (high - low + 1))
    return strides[: len(lows)][::-1]


def signed_corners(
    starts: list[Column], ends: list[Column], strides: list[int]
) -> tuple[list[int], list[int]]:
    """The corners of all boxes, as numbers: those with sign plus, and those with sign minus.

    The sign is a parity: in two dims plus where the box starts in both or ends in both. The corners
    are the mixed difference of the box's indicator function, which determines the function. So
    boxes cover another box, each point once, if and only if their signed corners add up to its
    corners, and no box is compared with another. A point is the sum of coordinates times strides.
    """
    plus: list[int] = [0] * len(starts[0])
    minus: list[int] = []
    for start, end, stride in zip(starts, ends, strides, strict=True):
        low, high = list(map(mul, start, repeat(stride))), list(map(mul, end, repeat(stride)))
        plus, minus = (
            [*map(add, plus, cycle(low)), *map(add, minus, cycle(high))],
            [*map(add, plus, cycle(high)), *map(add, minus, cycle(low))],
        )
    return plus, minus


def first_free(starts: Sequence[Column], ends: Sequence[Column], shape: Sequence[int]) -> list[int]:
    """The first point of a shape, in row-major order, that lies in none of the disjoint boxes.

    Found dim by dim: the coordinate is the first at which the volumes of the boxes' cross-sections
    do not add up to the volume of the shape's cross-section. O(n log n) for each dim.
    """
    members: Sequence[int] = range(len(starts[0])) if starts else ()
    point: list[int] = []
    for dim, extent in enumerate(shape):
        start, end = starts[dim], ends[dim]
        section = math.prod(shape[dim + 1 :])
        changes: dict[int, int] = {0: 0, extent: 0}
        inner = list(zip(starts[dim + 1 :], ends[dim + 1 :], strict=True))
        for i in members:
            own = math.prod([stop[i] - first[i] for first, stop in inner])
            changes[start[i]] = changes.get(start[i], 0) + own
            changes[end[i]] = changes.get(end[i], 0) - own
        covered = 0
        for at in sorted(changes):
            covered += changes[at]
            if covered < section:
                break
        point.append(at)
        members = [i for i in members if start[i] <= at < end[i]]
    return point


#: Up to this number, queries cost less than making blocks.
FEW_QUERIES = 4
#: The maximum of dims for corners, whose number doubles with each dim.
_MOST_CORNERED = 4


class BoxColumns:
    """The starts and the ends of many boxes that are not empty, as a list for each dim."""

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
        dims = self.differing_dims()
        starts, ends = [self.starts[dim] for dim in dims], [self.ends[dim] for dim in dims]
        if not dims:
            return self.count == 1
        lows, highs = list(map(min, starts)), list(map(max, ends))
        if len(dims) > _MOST_CORNERED:
            sizes = [list(map(sub, high, low)) for low, high in zip(starts, ends, strict=True)]
            volume = sum(map(math.prod, zip(*sizes, strict=True)))
            return volume == math.prod(map(sub, highs, lows)) and self._overlap() is None
        strides = strides_for(lows, highs)
        plus, minus = signed_corners(starts, ends, strides)
        full_plus, full_minus = signed_corners([[x] for x in lows], [[x] for x in highs], strides)
        return sorted(plus + full_minus) == sorted(minus + full_plus)

    def overlap(self) -> tuple[int, int] | None:
        """Two of the given boxes that overlap, the lower number first; None if no two do."""
        return None if self.count < 2 or self.cover_their_bounds() else self._overlap()

    def _overlap(self) -> tuple[int, int] | None:
        """The same by a sweep along a dim, past the boxes that cross a line: O(n log n + n m)."""
        dim = max(self.differing_dims(), key=lambda d: len(set(self.starts[d])), default=0)
        order, crossing = list(range(self.count)), list[int]()
        if self.starts:
            order.sort(key=self.starts[dim].__getitem__)
        for i in order:
            lows, highs = ([column[i] for column in side] for side in (self.starts, self.ends))
            if self.starts:
                stops, at = self.ends[dim], lows[dim]
                crossing = [j for j in crossing if stops[j] > at]
            for j in _overlapping(lows, highs, crossing, self.starts, self.ends):
                a, b = sorted((self.positions[i], self.positions[j]))
                return a, b
            crossing.append(i)
        return None

    def first_gap(self, shape: Ints) -> Box:
        """The first element of a tensor of this shape that no box covers; all without boxes."""
        if not self.count:
            return Box((0,) * len(shape), shape)
        return Box(tuple(first_free(self.starts, self.ends, shape)), (1,) * len(shape))

    def differing_dims(self) -> list[int]:
        spans = zip(self.starts, self.ends, strict=True)
        return [dim for dim, span in enumerate(spans) if not all(map(_is_constant, span))]


def _is_constant(column: Column) -> bool:
    return not column or column.count(column[0]) == len(column)


class BoxIndex(BoxColumns):
    """Boxes in blocks of neighbours, so that a query only looks into blocks that touch the box.

    There are about sqrt(n) blocks of sqrt(n) boxes, made by sorting in one dim after another and
    cutting evenly (S. Leutenegger, M. Lopez, J. Edgington, *STR*, ICDE 1997). Making the blocks
    takes O(n log n), a query O(sqrt(n)) plus the size of the result, unless boxes are long in every
    dim. The first few queries look at all boxes, which is cheaper if no more follow.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__([box.offsets for box in boxes], [box.sizes for box in boxes])
        self._queries = 0

    def overlapping(self, box: Box) -> list[int]:
        """The indices of the boxes that share an element with ``box``, ascending."""
        if box.empty or not self.count:
            return []
        self._queries += 1
        members: Sequence[int] = range(self.count)
        if self._queries > FEW_QUERIES:
            blocks = _overlapping(box.offsets, box.ends, range(len(self._blocks)), *self._bounds)
            members = [member for block in blocks for member in self._blocks[block]]
        members = _overlapping(box.offsets, box.ends, members, self.starts, self.ends)
        return sorted([self.positions[i] for i in members])

    @cached_property
    def _blocks(self) -> list[list[int]]:
        sort_by = [self.starts[dim] for dim in self.differing_dims()]
        return list(_blocks_of(list(range(self.count)), sort_by, math.isqrt(self.count)))

    @cached_property
    def _bounds(self) -> tuple[list[Column], list[Column]]:
        return (
            [[min([column[i] for i in block]) for block in self._blocks] for column in self.starts],
            [[max([column[i] for i in block]) for block in self._blocks] for column in self.ends],
        )


def _overlapping(
    lows: Sequence[int],
    highs: Sequence[int],
    members: Sequence[int],
    starts: list[Column],
    ends: list[Column],
) -> Sequence[int]:
    """The numbers, among ``members``, of the boxes that share an element with another box."""
    for low, high, start, end in zip(lows, highs, starts, ends, strict=True):
        members = [i for i in members if start[i] < high and end[i] > low]
    return members


def _blocks_of(members: list[int], sort_by: list[Column], blocks: int) -> Iterator[list[int]]:
    """Yield ``members``, numbers of boxes, in about ``blocks`` lists of boxes near each other."""
    if not sort_by or blocks <= 1:
        if members:
            yield members
        return
    slabs = math.ceil(blocks ** (1 / len(sort_by)))
    ordered = sorted(members, key=sort_by[0].__getitem__)
    size = -(-len(ordered) // slabs)
    for at in range(0, len(ordered), size):
        yield from _blocks_of(ordered[at : at + size], sort_by[1:], -(-blocks // slabs))
