"""Boxes as columns of numbers: queries about many boxes, without an object for each."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, combinations, cycle, groupby, pairwise, repeat
from operator import add, mul
from typing import NamedTuple

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

    In two dims, the first half of the plus corners is where boxes start in both dims. The first
    half of the minus corners is where boxes start in the first dim and end in the second.
    """
    plus: list[int] = []
    minus: list[int] = []
    for start, end, stride in zip(starts, ends, strides, strict=True):
        if stride != 1:
            start, end = list(map(mul, start, repeat(stride))), list(map(mul, end, repeat(stride)))
        if not plus:
            plus, minus = start, end
        else:
            plus, minus = (
                [*map(add, plus, cycle(start)), *map(add, minus, cycle(end))],
                [*map(add, plus, cycle(end)), *map(add, minus, cycle(start))],
            )
    return plus, minus


def left_over_2d(plus: list[int], minus: list[int]) -> dict[int, int] | None:
    """The points in two dims at which signed corners do not cancel, each with the remaining sum.

    None if two boxes have the same corner of one kind, and therefore overlap.
    """
    n = len(plus) // 2
    p, q, r, s = set(plus[:n]), set(plus[n:]), set(minus[:n]), set(minus[n:])
    if not len(p) == len(q) == len(r) == len(s) == n:
        return None
    # Most points cancel here, however the boxes are arranged in their rows.
    p, q, r, s = p - r, q - s, r - p, s - q
    left = dict.fromkeys(p - s, 1)
    for point in q - r:
        left[point] = left.get(point, 0) + 1
    for point in (*(r - q), *(s - p)):
        left[point] = left.get(point, 0) - 1
    return left


def nowhere_two_2d(left: dict[int, int], stride: int, low: int) -> bool:
    """True if no point is in two boxes, decided by the remaining corners.

    Row by row, the differences along a row are updated. The number of boxes is 0 or 1 everywhere in
    the row if and only if the differences alternate between 1 and -1. O(n log n) for n remaining
    points (and moving the entries of a sorted list, which is fast).

    Args:
        left: From :func:`left_over_2d`.
        stride: The stride of the first dim.
        low: The least coordinate in the second dim.
    """
    row: list[int] = []  # the places of differences, ascending
    difference: dict[int, int] = {}
    for _, points in groupby(sorted(left), key=lambda point: (point - low) // stride):
        changed = []
        for point in points:
            at = (point - low) % stride
            difference[at] = difference.get(at, 0) + left[point]
            changed.append(at)
        for at in changed:
            _keep_sorted(row, at, difference[at] != 0)
        if not all(_by_turns(row, difference, bisect_left(row, at)) for at in changed):
            return False
    return True


def _keep_sorted(row: list[int], at: int, present: bool) -> None:
    i = bisect_left(row, at)
    was_present = i < len(row) and row[i] == at
    if present and not was_present:
        row.insert(i, at)
    elif was_present and not present:
        del row[i]


def _by_turns(row: list[int], difference: dict[int, int], i: int) -> bool:
    """True if the differences at an entry and next to it alternate between 1 and -1."""
    first = max(i - 1, 0)
    near = [difference[at] for at in row[first : i + 2]]
    sign = near[0] if near else 1
    return sign in (1, -1) and near == [sign, -sign, sign][: len(near)]


#: The starts and the ends of boxes, in each dim.
Spans = list[tuple[list[int], list[int]]]

#: Up to this number of boxes are compared pair by pair.
FEW = 16


def find_pair(spans: Spans, count: int, few: int = FEW) -> tuple[int, int] | None:
    """The numbers of two boxes that overlap in every dim of ``spans``; None if no two do.

    No box may be empty.

    The boxes are divided at medians until at most ``few`` are left. O(n log n) as long as few boxes
    cross a dividing line; where each line crosses most of them, all pairs are compared.
    """
    if len(spans) == 1:
        return _neighbours(*spans[0])
    parts: list[Sequence[int]] = [range(count)]
    while parts:
        members = parts.pop()
        halves = _divide(spans, members) if len(members) > few else None
        if halves is not None:
            parts += halves
        elif (pair := _compare(spans, members)) is not None:
            return pair
    return None


def _neighbours(starts: list[int], ends: list[int]) -> tuple[int, int] | None:
    """The numbers of two boxes of one dim that overlap: two neighbours in the order of starts."""
    order = sorted(range(len(starts)), key=starts.__getitem__)
    return next(((i, j) for i, j in pairwise(order) if ends[i] > starts[j]), None)


def _compare(spans: Spans, members: Sequence[int]) -> tuple[int, int] | None:
    for i, j in combinations(members, 2):
        for starts, ends in spans:
            if starts[i] >= ends[j] or starts[j] >= ends[i]:
                break
        else:
            return i, j
    return None


def _divide(spans: Spans, members: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The boxes on each side of a dividing line (crossing boxes on both); None: no good line."""
    count = len(members)
    best, fewest = None, 1.25 * count
    for starts, ends in spans:
        for column in (starts, ends):
            at = sorted([column[i] for i in members])[count // 2]
            before = [i for i in members if starts[i] < at]
            after = [i for i in members if ends[i] > at]
            total = len(before) + len(after)
            if total <= fewest and max(len(before), len(after)) <= 0.9 * count:
                if total <= count + 2 * count**0.5:
                    return before, after
                best, fewest = (before, after), total
    return best


class _Region(NamedTuple):
    """A region from ``lows`` to ``highs``, its boxes, and the dims that some boxes do not span."""

    members: Sequence[int]
    lows: list[int]
    highs: list[int]
    dims: Sequence[int]


def cover_by_cuts(starts: Sequence[Column], ends: Sequence[Column]) -> bool:
    """True if boxes cover their bounding box, each element once. No box may be empty.

    For many dims, where a box has too many corners. A region is cut at every coordinate of a dim
    where no box is crossed, and the slabs are cut in the other dims in turn. All results of
    chunking dim by dim come apart into single boxes, in O(n log n) for each dim. Boxes that do not,
    such as a pinwheel, are a cover if no two overlap and their volumes add up.

    Args:
        starts: The starts of all boxes, in each dim.
        ends: The ends of all boxes, in each dim.

    Example:
        >>> cover_by_cuts([[0, 2]], [[2, 5]]), cover_by_cuts([[0, 3]], [[2, 5]])
        (True, False)
    """
    everything = range(len(starts[0]))
    regions = [
        _Region(everything, list(map(min, starts)), list(map(max, ends)), range(len(starts)))
    ]
    while regions:
        region = regions.pop()
        members, lows, highs, _ = region
        dims = [
            dim
            for dim in region.dims
            if any(starts[dim][i] != lows[dim] or ends[dim][i] != highs[dim] for i in members)
        ]
        if len(members) == 1 or not dims:
            if len(members) > 1 or dims:
                return False
            continue
        slabs = _slabs(starts, ends, region._replace(dims=dims))
        if slabs is None or (not slabs and not _is_full(starts, ends, region)):
            return False
        regions += slabs
    return True


def _slabs(
    starts: Sequence[Column], ends: Sequence[Column], region: _Region
) -> list[_Region] | None:
    """The slabs of a region, cut in the first possible dim; None if the boxes leave a gap."""
    for dim in region.dims:
        start, end = starts[dim], ends[dim]
        ordered = sorted(region.members, key=start.__getitem__)
        reached = list(accumulate([end[i] for i in ordered], max))
        if start[ordered[0]] > region.lows[dim] or reached[-1] < region.highs[dim]:
            return None
        cuts = [at for at in range(1, len(ordered)) if start[ordered[at]] >= reached[at - 1]]
        if any(start[ordered[at]] > reached[at - 1] for at in cuts):
            return None
        if cuts:
            return [
                _Region(
                    ordered[first:last],
                    [*region.lows[:dim], start[ordered[first]], *region.lows[dim + 1 :]],
                    [*region.highs[:dim], reached[last - 1], *region.highs[dim + 1 :]],
                    region.dims,
                )
                for first, last in zip([0, *cuts], [*cuts, len(ordered)], strict=True)
            ]
    return []


def _is_full(starts: Sequence[Column], ends: Sequence[Column], region: _Region) -> bool:
    sizes = [
        [end[i] - start[i] for i in region.members] for start, end in zip(starts, ends, strict=True)
    ]
    volume = sum(map(math.prod, zip(*sizes, strict=True)))
    extents = [high - low for low, high in zip(region.lows, region.highs, strict=True)]
    if volume != math.prod(extents):
        return False
    spans = [
        ([start[i] for i in region.members], [end[i] for i in region.members])
        for start, end in zip(starts, ends, strict=True)
    ]
    return find_pair(spans, len(region.members)) is None


def first_free(starts: Sequence[Column], ends: Sequence[Column], shape: Sequence[int]) -> list[int]:
    """The first point of a shape, in row-major order, that lies in no box.

    Found dim by dim: the coordinate is the first at which the volumes of the boxes' cross-sections
    do not add up to the volume of the shape's cross-section. O(n log n) for each dim.

    Args:
        starts: The starts of all boxes, in each dim. Boxes are within the shape, disjoint, and
            leave a point.
        ends: The ends of all boxes, in each dim.
        shape: The extents.

    Example:
        >>> first_free([[0, 0], [0, 3]], [[4, 4], [2, 5]], [4, 5])
        [0, 2]
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
        """True if corners prove the boxes disjoint; False leaves it open."""
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
        """A region without boxes that begins at ``first``, grown in the last dim first."""
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
        dims = self.differing_dims()
        return [self.starts[dim] for dim in dims], [self.ends[dim] for dim in dims]


def _is_constant(column: Column) -> bool:
    return not column or column.count(column[0]) == len(column)


#: Up to this number, queries cost less than making blocks.
FEW_QUERIES = 4


class BoxIndex:
    """Boxes in blocks of neighbours, so that a query only looks into blocks that touch the box.

    There are about sqrt(n) blocks of sqrt(n) boxes, made by sorting in one dim after another and
    cutting evenly (S. Leutenegger, M. Lopez, J. Edgington, *STR*, ICDE 1997). Making the blocks
    takes O(n log n), a query O(sqrt(n)) plus the size of the result, unless boxes are long in every
    dim. The first few queries look at all boxes, which is cheaper if no more follow.

    Args:
        boxes: The boxes, of one number of dims; empty boxes are never found.

    Example:
        >>> BoxIndex([Box((0,), (5,)), Box((5,), (5,))]).overlapping(Box((4,), (3,)))
        [0, 1]
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._columns = BoxColumns([box.offsets for box in boxes], [box.sizes for box in boxes])
        self._queries = 0

    def overlapping(self, box: Box) -> list[int]:
        """The indices of the boxes that share an element with ``box``, ascending."""
        columns = self._columns
        if box.empty or not columns.count:
            return []
        self._queries += 1
        members: Sequence[int] = range(columns.count)
        if self._queries > FEW_QUERIES:
            blocks = _overlapping(box, range(len(self._blocks)), *self._bounds)
            members = [member for block in blocks for member in self._blocks[block]]
        members = _overlapping(box, members, columns.starts, columns.ends)
        return sorted([columns.positions[i] for i in members])

    @cached_property
    def _blocks(self) -> list[list[int]]:
        columns = self._columns
        sort_by = [columns.starts[dim] for dim in columns.differing_dims()]
        return list(_blocks_of(list(range(columns.count)), sort_by, math.isqrt(columns.count)))

    @cached_property
    def _bounds(self) -> tuple[list[Column], list[Column]]:
        starts, ends = self._columns.starts, self._columns.ends
        return (
            [[min([column[i] for i in block]) for block in self._blocks] for column in starts],
            [[max([column[i] for i in block]) for block in self._blocks] for column in ends],
        )


def _overlapping(
    box: Box, members: Sequence[int], starts: list[Column], ends: list[Column]
) -> Sequence[int]:
    """The numbers, among ``members``, of the boxes that share an element with ``box``."""
    for low, size, start, end in zip(box.offsets, box.sizes, starts, ends, strict=True):
        high = low + size
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
