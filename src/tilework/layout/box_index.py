"""An index of many boxes, to find those that overlap a given box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from tilework.layout.box import Box
from tilework.layout.box_columns import BoxColumns
from tilework.layout.signed_corners import Column

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
        """The starts and the ends of the blocks, in each dim."""
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
