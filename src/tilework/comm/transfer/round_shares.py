"""The shares of a plan's pieces in each round: pure integers, equal on both ends.

A rank's pieces for one peer form a stream: one piece after the other, each in row-major order. A
stream is split into as many equal shares as there are rounds. A split moves a little, to fall
between rows (or larger parts) of a piece: then a share is a box again, and copied as one box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilework.layout import Box, Piece

#: The index of a block of a tensor; the block is complete in dims that the index leaves out.
Block = tuple[slice, ...]
#: A split moves by at most the share divided by this.
_SLACK = 8


class PieceRange(NamedTuple):
    """Elements of a piece, from ``start`` to ``stop`` (exclusive) in row-major order."""

    piece: Piece
    start: int
    stop: int

    @property
    def volume(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def rounds_for(elements: int, room: int, streams: int) -> int:
    """A number of rounds, large enough that each round's shares have at most ``room`` elements.

    Each of ``streams`` streams has a share in each round, an element longer than an equal share at
    most; a round moves at least an element of each stream.
    """
    return max(1, math.ceil(elements * (1 + 1 / _SLACK) / max(1, room - streams)))


def shares(pieces: Sequence[Piece], rounds: int) -> list[list[PieceRange]]:
    """Split a stream, ``pieces`` in order, into a share for each round: the parts to move.

    Example:
        >>> piece = Piece(Box((0, 0), (4, 2)), 0, 1, 0, 0, 0)
        >>> [[(part.start, part.stop) for part in share] for share in shares([piece], 2)]
        [[(0, 4)], [(4, 8)]]
    """
    total = sum(piece.box.volume for piece in pieces)
    result: list[list[PieceRange]] = [[] for _ in range(rounds)]
    number = before = 0
    for piece in pieces:
        volume, start = piece.box.volume, 0
        unit = _unit(piece.box.sizes, total // rounds // _SLACK)
        while start < volume:
            end = total * (number + 1) // rounds - before
            stop = volume if end >= volume else max(start, end - end % unit)
            if stop > start:
                result[number].append(PieceRange(piece, start, stop))
            number += stop < volume
            start = stop
        before += volume
    return result


def _unit(sizes: Sequence[int], limit: int) -> int:
    """The largest part of a box (row, plane, …) of at most ``limit`` elements."""
    unit = 1
    for size in reversed(sizes):
        if unit * size > limit:
            break
        unit *= size
    return unit


def blocks(sizes: Sequence[int], start: int, stop: int) -> list[Block]:
    """The blocks that together hold the elements from ``start`` to ``stop``, in order.

    ``sizes`` is the shape of the tensor; elements count in row-major order, without ``stop``.

    Example:
        >>> blocks((3, 4), 2, 8)
        [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None),)]
    """
    if start >= stop:
        return []
    if stop - start == math.prod(sizes):
        return [()]
    row = math.prod(sizes[1:])
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        return _in_row(sizes, first, skipped, left)
    result = []
    if skipped:
        result += _in_row(sizes, first, skipped, row)
        first += 1
    if first < last:
        result.append((slice(first, last),))
    return result + _in_row(sizes, last, 0, left)


def _in_row(sizes: Sequence[int], row: int, start: int, stop: int) -> list[Block]:
    return [(slice(row, row + 1), *block) for block in blocks(sizes[1:], start, stop)]


def regions(box: Box, rounds: int) -> list[list[Box]]:
    """Cut a box into ``rounds`` nearly equal regions in row-major order, each of a few boxes."""
    piece = Piece(box, 0, 0, 0, 0, 0)
    return [
        [_part_of(box, block) for part in share for block in blocks(box.sizes, *part[1:])]
        for share in shares([piece], rounds)
    ]


def _part_of(box: Box, block: Block) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, span in enumerate(block):
        offsets[dim] += span.start
        sizes[dim] = span.stop - span.start
    return Box(tuple(offsets), tuple(sizes))


def region_shares(
    pieces: Sequence[Piece], rounds: int, regions_of: Callable[[int], list[list[Box]]]
) -> list[list[PieceRange]]:
    """For each round, the parts of pieces in the round's region (``regions_of``) of their tile."""
    result: list[list[PieceRange]] = [[] for _ in range(rounds)]
    for piece in pieces:
        for number, boxes in enumerate(regions_of(piece.dst_tile)):
            for box in boxes:
                shared = piece.box.intersection(box)
                if shared is not None:
                    result[number].append(PieceRange(piece._replace(box=shared), 0, shared.volume))
    return result
