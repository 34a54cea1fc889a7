"""Transfers between the tiles of two tilings: their boxes, receivers and senders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle, pairwise
from typing import NamedTuple

from tilework.layout.box import Box, Ints, with_span
from tilework.layout.cost import CostModel
from tilework.layout.tiling import Tiling

#: The reductions with an identity element, which fills a term without a value.
HAVE_IDENTITY = frozenset({"sum", "product", "min", "max", "band", "bor", "bxor"})

#: Bytes per element for choices before the dtype is known.
ASSUMED_ITEMSIZE = 4


class Piece(NamedTuple):
    """A box that one rank has and another gets; or that a rank copies, if both are the same."""

    box: Box
    """The box in the coordinates of the full tensor."""
    src: int
    """The global rank that has the box."""
    dst: int
    """The global rank that gets the box."""
    src_tile: int
    """The index, in the source tiling's ``tiles``, of the tile that the piece is taken from."""
    dst_tile: int
    """The index, in the target tiling's ``tiles``, of the tile that the piece becomes a part of."""
    term: int
    """The index of the source's term that the piece belongs to."""


class TileTransfers:
    """The pieces that move between two tilings, for one rank at a time, consistent on all ranks.

    No rank receives a piece that it has. If several ranks have a piece, one of them sends it to
    each receiver:

    - If ranks are arranged in copies, as along a replicated axis of a mesh: the owner in the
      receiver's copy.
    - Otherwise the owners of a tile take turns, owners on the receiver's host first. If there are
      fewer receivers than owners, boxes are split so that more owners send.
    """

    def __init__(self, source: Tiling, target: Tiling, cost: CostModel) -> None:
        self.source, self.target, self._cost = source, target, cost
        self.term_by_term = keeps_terms(source, target)
        self.valued = valued_terms(source, target)
        self._copies = None if cost.hosts else copies(source, target)
        self._senders: dict[int, dict[tuple[int, int], Ints]] = {}

    def sent_by(self, rank: int) -> Iterator[Piece]:
        for s in self.source.of(rank):
            tile = self.source.tiles[s]
            if len(tile.owners) > 1 and self._copies is None:
                wanting = [
                    request for request, srcs in self._assigned_senders(s).items() if rank in srcs
                ]
            else:
                wanting = [
                    (d, dst)
                    for d, dst in self._requests(s)
                    if self._sender(tile.owners, dst) == rank
                ]
            for d, dst in wanting:
                yield from (piece for piece in self._pieces(s, d, dst) if piece.src == rank)

    def received_by(self, rank: int) -> Iterator[Piece]:
        for d in self.target.of(rank):
            for s in self.sources(d):
                yield from self._pieces(s, d, rank)

    def sources(self, d: int) -> list[int]:
        box, term = self.target.tiles[d].box, self.target.term_of(d)
        if self.term_by_term:
            return self.source.overlapping(term, box)
        terms = range(len(self.source.terms)) if term in self.valued else ()
        return [s for term in terms for s in self.source.overlapping(term, box)]

    def _pieces(self, s: int, d: int, dst: int) -> Iterator[Piece]:
        tile = self.source.tiles[s]
        box = tile.box.intersection(self.target.tiles[d].box)
        assert box is not None
        term = self.source.term_of(s)
        if dst in tile.owners:
            yield Piece(box, dst, dst, s, d, term)
        elif len(tile.owners) == 1 or self._copies is not None:
            yield Piece(box, self._sender(tile.owners, dst), dst, s, d, term)
        else:
            srcs = self._assigned_senders(s)[d, dst]
            for src, part in zip(srcs, _split(box, len(srcs)), strict=True):
                yield Piece(part, src, dst, s, d, term)

    def _requests(self, s: int) -> list[tuple[int, int]]:
        tile, term = self.source.tiles[s], self.source.term_of(s)
        terms = (term,) if self.term_by_term else self.valued
        overlapping = [d for t in terms for d in self.target.overlapping(t, tile.box)]
        have, tiles = set(tile.owners), self.target.tiles
        return [(d, dst) for d in overlapping for dst in tiles[d].owners if dst not in have]

    def _sender(self, owners: Ints, dst: int) -> int:
        return owners[0] if self._copies is None else owners[self._copies[dst]]

    def _assigned_senders(self, s: int) -> dict[tuple[int, int], Ints]:
        if s not in self._senders:
            self._senders[s] = self._by_turns(s, self._requests(s))
        return self._senders[s]

    def _by_turns(self, s: int, requests: list[tuple[int, int]]) -> dict[tuple[int, int], Ints]:
        owners = self.source.tiles[s].owners
        # The first owner sends the first tile first, the second owner the next.
        if len(requests) >= len(owners) and not self._cost.hosts:
            first = s % len(owners)
            turn = cycle([(owner,) for owner in owners[first:] + owners[:first]])
            return dict(zip(requests, turn, strict=False))
        turns: Counter[Ints] = Counter()
        senders = {}
        for d, dst in requests:
            near = self._nearest(owners, dst)
            parts = 1
            if len(requests) < len(near):
                parts = self._parts(s, d, len(near) // len(requests))
            at = s + turns[near]
            turns[near] += parts
            senders[d, dst] = tuple([near[(at + i) % len(near)] for i in range(parts)])
        return senders

    def _nearest(self, owners: Ints, dst: int) -> Ints:
        if not self._cost.hosts:
            return owners
        return tuple([owner for owner in owners if self._cost.near(owner, dst)]) or owners

    def _parts(self, s: int, d: int, most: int) -> int:
        """The best number of parts, at most ``most``, in which to send the overlap of two tiles."""
        box = self.source.tiles[s].box.intersection(self.target.tiles[d].box)
        assert box is not None
        return min(self._cost.parts(box.volume * ASSUMED_ITEMSIZE, most), max(box.sizes, default=1))


def keeps_terms(source: Tiling, target: Tiling) -> bool:
    """True if each term is moved separately, and nothing is reduced."""
    terms = len(source.terms)
    return terms > 1 and terms == len(target.terms) and source.reduce_op == target.reduce_op


def valued_terms(source: Tiling, target: Tiling) -> range:
    """The target's terms that get a value; the others get the reduction's identity element."""
    op, terms = target.reduce_op, range(len(target.terms))
    if op is None or op == "avg" or keeps_terms(source, target):
        return terms
    if op not in HAVE_IDENTITY:
        raise NotImplementedError(
            f"a whole value cannot become Partial({op!r}) on {len(terms)} ranks: {op!r} has no "
            f"identity element for the ranks that do not hold the value; use one of "
            f"{', '.join(sorted(HAVE_IDENTITY))}, avg"
        )
    return terms[:1]


@lru_cache(maxsize=32)
def copies(source: Tiling, target: Tiling) -> dict[int, int] | None:
    """For each rank the number of the copy of the source that it belongs to; None without copies.

    There are copies if all source tiles have equally many owners, at least two, and if among the
    owners of a target tile those with equal source tiles are one rank of each copy.
    """
    filled = [tile for tile in source.tiles if not tile.box.empty]
    count = len(filled[0].owners) if filled else 1
    if count == 1 or any(len(tile.owners) != count for tile in filled):
        return None
    copy_of: dict[int, int] = {}
    for tile in sorted(source.tiles, key=lambda tile: tile.box.empty):
        for place, owner in enumerate(tile.owners):
            copy_of.setdefault(owner, place)
    for tile in target.tiles:
        alike = Counter([source.of(owner) for owner in tile.owners])
        if not tile.box.empty and (() in alike or set(alike.values()) != {count}):
            return None
    return copy_of


def _split(box: Box, parts: int) -> list[Box]:
    """The box, split into ``parts`` along the first dim of at least ``parts`` elements."""
    if parts == 1:
        return [box]
    dim = next(d for d, size in enumerate(box.sizes) if size >= parts)
    start, size = box.offsets[dim], box.sizes[dim]
    bounds = [start + size * i // parts for i in range(parts + 1)]
    return [with_span(box, dim, low, high - low) for low, high in pairwise(bounds)]
