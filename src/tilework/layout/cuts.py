"""Exact covers in many dims, where a box has too many corners: by cuts that cross no box.

A region is cut at every coordinate of a dim where no box is crossed, and the slabs are cut in the
other dims in turn. Grids, and all other results of chunking dim by dim, come apart into single
boxes, in O(n log n) for each dim. Boxes that do not come apart, such as a pinwheel, are a cover if
no two overlap and their volumes add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tilework.layout.overlap_search import find_pair
from tilework.layout.signed_corners import Column


class _Region(NamedTuple):
    """A box-shaped region, and the boxes in it.

    Attributes:
        members: The numbers of the boxes in the region.
        lows: The start of the region in each dim.
        highs: The end of the region in each dim.
        dims: The dims in which some boxes do not span the region.
    """

    members: Sequence[int]
    lows: list[int]
    highs: list[int]
    dims: Sequence[int]


def cover_by_cuts(starts: Sequence[Column], ends: Sequence[Column]) -> bool:
    """True if boxes cover their bounding box, each element once. No box may be empty.

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
    """The slabs of a region that is cut, in the first possible dim, wherever no box is crossed.

    Empty if no dim can be cut. None if a gap shows that the boxes do not cover the region.
    """
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
