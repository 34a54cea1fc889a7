"""Finding the boxes, among many, that share something with a given one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tilework.layout.box import Box
from tilework.layout.columns import Column, Columns


class BoxIndex:
    """Boxes in blocks of neighbours, so that only blocks that touch a box are looked into.

    There are about sqrt(n) blocks of sqrt(n) boxes, made by sorting in one dim after another and
    cutting evenly (S. Leutenegger, M. Lopez, J. Edgington, *STR*, ICDE 1997). Making them takes
    O(n log n), a question O(sqrt(n)) and what it finds, unless boxes are long in every dim.

    Args:
        boxes: Of one number of dims; empty ones are never found.

    Example:
        >>> BoxIndex([Box((0,), (5,)), Box((5,), (5,))]).overlapping(Box((4,), (3,)))
        [0, 1]
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        columns = Columns([box.offsets for box in boxes], [box.sizes for box in boxes])
        self._positions = columns.positions
        self._starts, self._ends = columns.starts, columns.ends
        dims = columns.differing_dims()
        sort_by = [columns.starts[dim] for dim in dims]
        self._blocks = list(_cut(list(range(columns.count)), sort_by, math.isqrt(columns.count)))
        self._lows = [[min([s[i] for i in block]) for block in self._blocks] for s in self._starts]
        self._highs = [[max([e[i] for i in block]) for block in self._blocks] for e in self._ends]

    def overlapping(self, box: Box) -> list[int]:
        """The numbers of the boxes that share an element with ``box``, ascending."""
        if box.empty or not self._blocks:
            return []
        blocks = _touching(box, range(len(self._blocks)), self._lows, self._highs)
        members = [member for block in blocks for member in self._blocks[block]]
        positions = self._positions
        return sorted([positions[i] for i in _touching(box, members, self._starts, self._ends)])


def _touching(
    box: Box, members: Sequence[int], starts: list[Column], ends: list[Column]
) -> Sequence[int]:
    """Which of ``members`` share an element with ``box``."""
    for low, size, start, end in zip(box.offsets, box.sizes, starts, ends, strict=True):
        high = low + size
        members = [i for i in members if start[i] < high and end[i] > low]
    return members


def _cut(members: list[int], sort_by: list[Column], blocks: int) -> Iterator[list[int]]:
    """The members in about so many blocks; those of a block are near each other."""
    if not sort_by or blocks <= 1:
        if members:
            yield members
        return
    slabs = math.ceil(blocks ** (1 / len(sort_by)))
    ordered = sorted(members, key=sort_by[0].__getitem__)
    size = -(-len(ordered) // slabs)
    for at in range(0, len(ordered), size):
        yield from _cut(ordered[at : at + size], sort_by[1:], -(-blocks // slabs))
