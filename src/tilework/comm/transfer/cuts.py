"""Which elements of a plan's pieces go in which round: pure integers, alike on both ends.

A rank's pieces for one peer, one after the other, each in row-major order, are a stream. It is cut
into as many equal shares as there are rounds. A cut prefers to fall between rows (or larger parts)
of a piece, where that moves it by little: then a share is a box again, and copied as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tilework.layout import Box, Piece

#: A cut moves by at most this part of a share.
_SLACK = 8


class Part(NamedTuple):
    """Elements of a piece, from ``start`` to ``stop`` (exclusive) in row-major order."""

    piece: Piece
    start: int
    stop: int

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def boxes(self) -> Iterator[Box]:
        """The boxes, in the tensor's coordinates, that have these elements in this order."""
        return boxes_between(self.piece.box, self.start, self.stop)


def rounds_for(elements: int, room: int, streams: int) -> int:
    """How many rounds keep shares of ``streams`` streams together within ``room`` elements.

    Args:
        elements: How many all streams have together.
        room: For the shares of one round; a round moves at least an element of each stream.
        streams: How many there are; each share may be an element longer than its part.
    """
    return max(1, math.ceil(elements * (1 + 1 / _SLACK) / max(1, room - streams)))


def shares(pieces: Sequence[Piece], rounds: int) -> list[list[Part]]:
    """A stream's share of each round.

    Example:
        >>> piece = Piece(Box((0, 0), (4, 2)), 0, 1, 0, 0, 0)
        >>> [[(part.start, part.stop) for part in share] for share in shares([piece], 2)]
        [[(0, 4)], [(4, 8)]]
    """
    total = sum(piece.box.volume for piece in pieces)
    result: list[list[Part]] = [[] for _ in range(rounds)]
    number = before = 0
    for piece in pieces:
        volume, start = piece.box.volume, 0
        unit = _unit(piece.box.sizes, total // rounds // _SLACK)
        while start < volume:
            end = total * (number + 1) // rounds - before
            stop = volume if end >= volume else max(start, end - end % unit)
            if stop > start:
                result[number].append(Part(piece, start, stop))
            number += stop < volume
            start = stop
        before += volume
    return result


def _unit(sizes: Sequence[int], limit: int) -> int:
    """The elements of the largest part of a box that is not to be cut (rows, planes)."""
    unit = 1
    for size in reversed(sizes):
        if unit * size > limit:
            break
        unit *= size
    return unit


def regions(box: Box, rounds: int) -> list[list[Box]]:
    """A tile in as many nearly equal regions, each some boxes, in row-major order.

    Example:
        >>> [list(map(str, region)) for region in regions(Box((0, 0), (4, 2)), 2)]
        [['[0:2, 0:2]'], ['[2:4, 0:2]']]
    """
    whole = Piece(box, 0, 0, 0, 0, 0)
    return [[b for part in share for b in part.boxes()] for share in shares([whole], rounds)]


def boxes_between(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The boxes that have the elements of ``box`` from ``start`` to ``stop``, in that order.

    Example:
        >>> [str(b) for b in boxes_between(Box((0, 0), (3, 4)), 2, 9)]
        ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:1]']
    """
    if start >= stop:
        return
    if stop - start == box.volume:
        yield box
        return
    row = math.prod(box.sizes[1:])
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        yield from _in_row(box, first, skipped, left)
        return
    if skipped:
        yield from _in_row(box, first, skipped, row)
        first += 1
    if first < last:
        yield _rows(box, first, last)
    yield from _in_row(box, last, 0, left)


def _rows(box: Box, first: int, last: int) -> Box:
    return Box((box.offsets[0] + first, *box.offsets[1:]), (last - first, *box.sizes[1:]))


def _in_row(box: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    for inner in boxes_between(Box(box.offsets[1:], box.sizes[1:]), start, stop):
        yield Box((box.offsets[0] + row, *inner.offsets), (1, *inner.sizes))


def region_shares(
    pieces: Sequence[Piece], rounds: int, regions_of: Callable[[int], list[list[Box]]]
) -> list[list[Part]]:
    """What of each piece lies in the region of its target tile that each round has.

    Args:
        pieces: One after the other.
        rounds: How many rounds there are.
        regions_of: The regions of a target tile, by its index.
    """
    result: list[list[Part]] = [[] for _ in range(rounds)]
    for piece in pieces:
        for number, boxes in enumerate(regions_of(piece.dst_tile)):
            for box in boxes:
                shared = piece.box.intersection(box)
                if shared is not None:
                    result[number].append(Part(piece._replace(box=shared), 0, shared.volume))
    return result
