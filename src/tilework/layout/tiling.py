"""Tilings: which ranks hold which boxes of a tensor, without overlaps or gaps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any

from tilework.layout.box import Box, Ints
from tilework.layout.box_columns import BoxColumns, BoxIndex


def find_overlap(
    offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """The numbers of two boxes that overlap, the lower number first; None if no two do.

    The boxes are given by offsets and sizes. Empty boxes overlap nothing.

    Raises:
        ValueError: The boxes differ in their number of dims.

    Example:
        >>> find_overlap([[0], [5], [4]], [[5], [5], [1]])
        (0, 2)
    """
    return BoxColumns(offsets, sizes).overlap()


def check_disjoint(boxes: Sequence[Box]) -> None:
    """Raise if two boxes share an element.

    Raises:
        ValueError: Two boxes overlap (the message names both), or have different numbers of dims.

    Example: see :func:`check_boxes`.
    """
    _check_overlap(BoxIndex(boxes), boxes)


def check_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise unless the boxes cover the shape, each element once. Empty boxes may be anywhere.

    Raises:
        ValueError: A box has another number of dims or is out of bounds, two boxes overlap, or a
            part of the shape is not covered; the message names them.

    Example:
        >>> check_boxes((10,), [Box((0,), (5,)), Box((5,), (5,))])
        >>> check_boxes((10,), [Box((0,), (5,)), Box((6,), (4,))])
        Traceback (most recent call last):
        ValueError: boxes do not cover the entire tensor: total volume 9 does not match tensor
        volume 10, no box covers [5:6]
    """
    shape = tuple(shape)
    if _are_stacked(shape, boxes):
        return
    columns = BoxIndex(boxes)
    _check_bounds(shape, columns, boxes)
    if columns.cover((0,) * len(shape), shape):
        return
    _check_overlap(columns, boxes)
    volume, expected = sum([box.volume for box in boxes]), math.prod(shape)
    if volume != expected:
        raise ValueError(
            f"boxes do not cover the entire tensor: total volume {volume} does not match tensor "
            f"volume {expected}, no box covers {columns.first_gap(shape)}"
        )


def _are_stacked(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """True if the boxes are ranges of dim 0, in order: the usual case, and quickly checked."""
    if not shape or not boxes:
        return False
    rest, begin, zeros = shape[1:], 0, (0,) * (len(shape) - 1)
    for box in boxes:
        offsets, sizes = box.offsets, box.sizes
        if sizes[1:] != rest or offsets[1:] != zeros or offsets[:1] != (begin,):
            return False
        begin += sizes[0]
    return begin == shape[0]


def _check_bounds(shape: tuple[int, ...], columns: BoxColumns, boxes: Sequence[Box]) -> None:
    if not boxes:
        return
    if boxes[0].ndim != len(shape):
        raise ValueError(
            f"a tensor of shape {shape} has {len(shape)} dims, but the boxes have {boxes[0].ndim}"
        )
    for dim, (extent, ends) in enumerate(zip(shape, columns.ends, strict=True)):
        last = max(ends, default=0)
        if last > extent:
            i = columns.positions[ends.index(last)]
            raise ValueError(
                f"box {i}, {boxes[i]}, is out of bounds: dim {dim} of a tensor of shape {shape} "
                f"ends at {extent}"
            )


def _check_overlap(columns: BoxColumns, boxes: Sequence[Box]) -> None:
    pair = columns.overlap()
    if pair is None:
        return
    i, j = pair
    a, b = boxes[i], boxes[j]
    raise ValueError(f"boxes {i} and {j} overlap: {a} and {b} share {a.intersection(b)}")


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a tensor, and the ranks that hold it, a full copy each.

    Args:
        owners: Global ranks, at least one, none twice; the preferred owner first.

    Raises:
        ValueError: There is no owner, or an owner is named twice.
    """

    box: Box
    owners: Ints

    def __post_init__(self) -> None:
        owners = tuple(map(int, self.owners))
        if not owners or len(set(owners)) != len(owners):
            raise ValueError(f"tile {self.box} needs at least one owner, none twice, got {owners}")
        _set_owners(self, owners)


_new = object.__new__
# The descriptor of a slot can write where a frozen dataclass refuses.
_set_box = Tile.__dict__["box"].__set__
_set_owners = Tile.__dict__["owners"].__set__


def trusted_tile(box: Box, owners: Ints) -> Tile:
    """A tile made without checks, from a box and owners that are known to be right."""
    tile = _new(Tile)
    _set_box(tile, box)
    _set_owners(tile, owners)
    return tile


@dataclass(frozen=True, eq=False)
class Tiling:
    """The boxes of a tensor and the ranks that hold them: the general form of a sharding.

    The tensor's value is the reduction of the tiling's terms, each of which covers the tensor
    exactly. There are several terms only if the value is partial: for example, the sum of the
    tensors that several ranks hold. Tiles without elements may be anywhere.

    Local tensors of a rank are always listed in the order of :meth:`of`.

    Args:
        reduce_op: The reduction of terms ("sum", "max", …); None if and only if there is one term.

    Raises:
        ValueError: A term does not cover the shape exactly (the message names the boxes, see
            :func:`~tilework.layout.check_boxes`), or terms and ``reduce_op`` do not fit together.

    Example:
        >>> upper, lower = Box((0,), (2,)), Box((2,), (2,))
        >>> halves = Tiling.of_tiles((4,), [Tile(upper, (0,)), Tile(lower, (1, 2))])
        >>> halves.ranks, halves.of(1), halves.boxes_of(1) == (lower,)
        ((0, 1, 2), (1,), True)
    """

    shape: Ints
    terms: tuple[tuple[Tile, ...], ...]
    reduce_op: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "terms", tuple(map(tuple, self.terms)))
        if not self.terms or (len(self.terms) > 1) != (self.reduce_op is not None):
            raise ValueError(
                f"a tiling must have one term and no reduce_op, or several terms and a reduce_op, "
                f"got "
                f"{len(self.terms)} terms and reduce_op={self.reduce_op!r}"
            )
        for term in self.terms:
            check_boxes(self.shape, [tile.box for tile in term])

    @classmethod
    def of_tiles(cls, shape: Sequence[int], tiles: Iterable[Tile]) -> Tiling:
        """A tiling of one term."""
        return cls(tuple(shape), (tuple(tiles),))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles of all terms, in order. Other methods name a tile by the index in this."""
        return self.terms[0] if len(self.terms) == 1 else sum(self.terms, ())

    @cached_property
    def ranks(self) -> Ints:
        """The ranks that hold a tile, ascending; an empty tile counts."""
        return tuple(sorted(self._held))

    def of(self, rank: int) -> Ints:
        """The indices of the tiles that ``rank`` holds, ascending."""
        return self._held.get(rank, ())

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, in the order of :meth:`of`."""
        return tuple([self.tiles[i].box for i in self.of(rank)])

    def term_of(self, tile: int) -> int:
        """The index of the term that the tile with this index belongs to."""
        return bisect_right(self.term_starts, tile) - 1

    def overlapping(self, term: int, box: Box) -> list[int]:
        """The indices of the tiles of one term that share an element with ``box``, ascending."""
        start = self.term_starts[term]
        indices = self._indices[term].overlapping(box)
        return [start + i for i in indices] if start else indices

    @cached_property
    def term_starts(self) -> Ints:
        """The index of each term's first tile."""
        return (0, *accumulate(map(len, self.terms)))[:-1]

    @cached_property
    def _held(self) -> dict[int, Ints]:
        owners = [tile.owners for tile in self.tiles]
        sole: dict[int, Ints] = dict(
            zip(chain.from_iterable(owners), zip(range(len(owners))), strict=False)
        )
        if len(sole) == len(owners) == sum(map(len, owners)):
            return sole  # each rank has exactly one tile
        held: defaultdict[int, list[int]] = defaultdict(list)
        for i, ranks in enumerate(owners):
            for rank in ranks:
                held[rank].append(i)
        return {rank: tuple(tiles) for rank, tiles in held.items()}

    @cached_property
    def _indices(self) -> list[BoxIndex]:
        return [BoxIndex([tile.box for tile in term]) for term in self.terms]

    @cached_property
    def digest(self) -> int:
        """A number below 2**63 that is equal in every process where the tiling is equal.

        Different tilings have different digests, up to collisions of BLAKE2.
        """
        text = repr(self._content).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1

    @cached_property
    def _content(self) -> tuple[object, ...]:
        boxes = [tile.box for tile in self.tiles]
        owners = [tile.owners for tile in self.tiles]
        numbers = [box.offsets for box in boxes], [box.sizes for box in boxes], owners
        return self.shape, self.term_starts, self.reduce_op, *numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tiling):
            return NotImplemented
        return self is other or self._content == other._content

    def __hash__(self) -> int:
        # A few tiles distinguish most tilings, and thousands would take longer than a plan.
        ends = [(len(term), term[:1], term[-1:]) for term in (self.terms[0], self.terms[-1])]
        return hash((self.shape, *ends, self.reduce_op))

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle: only the fields, since cached values can be computed again."""
        return {name: self.__dict__[name] for name in ("shape", "terms", "reduce_op")}


def trusted_tiling(
    shape: Ints, terms: tuple[tuple[Tile, ...], ...], reduce_op: str | None = None
) -> Tiling:
    """A tiling made without checks, from arguments that are known to be right."""
    tiling = _new(Tiling)
    tiling.__dict__.update(shape=shape, terms=terms, reduce_op=reduce_op)
    return tiling
