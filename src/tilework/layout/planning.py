"""Plans: what each rank sends, receives and keeps to get from one tiling to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilework.layout.box import Box, Ints
from tilework.layout.cost import CostModel
from tilework.layout.tiling import Tiling

Kind = Literal[
    "none",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
]


class Piece(NamedTuple):
    """One box that one rank has and another gets."""

    box: Box
    """In the whole tensor's coordinates."""
    src: int
    dst: int
    src_tile: int
    """The index in the source tiling's ``tiles`` of the tile that it is cut from."""
    dst_tile: int
    """The index in the target tiling's ``tiles`` of the tile that it becomes a part of."""
    term: int
    """The source's term that it belongs to."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Which collective does the same as a plan, and who takes part."""

    kind: Kind
    ranks: Ints
    """The ranks that take part together, ascending."""
    root: int | None = None
    """Of broadcast and scatter the rank that has all, of gather the one that gets all."""


@dataclass(frozen=True)
class Plan:
    """What one rank does to get from ``source`` to ``target``.

    Pieces to and from a peer are in one order on both ends: by (dst_tile, term, offsets).
    """

    rank: int
    source: Tiling
    target: Tiling
    sends: tuple[Piece, ...]
    """What the rank gives to others; by (dst, dst_tile, term, offsets)."""
    receives: tuple[Piece, ...]
    """What it gets from others; by (src, dst_tile, term, offsets)."""
    keeps: tuple[Piece, ...]
    """What it only copies from its own tiles."""
    fills: Ints
    """The target tiles of this rank that no piece reaches: they get the neutral element of the
    target's reduction ("avg": see :func:`plan`)."""
    collective: Collective

    @property
    def reduces(self) -> bool:
        """Whether the pieces of several terms meet in a target tile and are combined, in the
        order of terms, by the source's reduction.
        """
        return len(self.source.terms) > 1 and not _by_term(self.source, self.target)

    def bytes_sent(self, itemsize: int) -> int:
        """How many bytes the rank gives to others."""
        return itemsize * sum(piece.box.volume for piece in self.sends)

    def bytes_received(self, itemsize: int) -> int:
        """How many bytes the rank gets from others."""
        return itemsize * sum(piece.box.volume for piece in self.receives)


def plan(source: Tiling, target: Tiling, rank: int, cost: CostModel | None = None) -> Plan:
    """What ``rank`` does so that a tensor laid out as ``source`` is laid out as ``target``.

    Every rank plans for itself and all agree; nothing is communicated. A rank is sent only what
    it lacks. Of several owners of a box one sends it: one on the receiver's host if ``cost``
    knows of one, and by turns.

    If both tilings are partial with as many terms and one reduction, each term is moved on its own.
    Otherwise the terms of the source are reduced where they arrive; of a partial target the first
    term gets the value and the others the reduction's neutral element (``fills``).

    Args:
        source: The layout that the tensor has.
        target: The layout that it gets; of the same shape.
        rank: The global rank whose part is planned.
        cost: What messages cost, and who shares a host.

    Raises:
        ValueError: The shapes differ.
        NotImplementedError: The target is partial with a reduction that has no neutral element.

    Example:
        >>> from tilework.layout.placements import Replicate, Shard, mesh_tiling
        >>> rows = mesh_tiling((4, 4), [0, 1], [Shard(0)])
        >>> columns = mesh_tiling((4, 4), [0, 1], [Shard(1)])
        >>> [(str(p.box), p.dst) for p in plan(rows, columns, rank=0).sends]
        [('[0:2, 2:4]', 1)]
    """
    if source.shape != target.shape:
        raise ValueError(
            f"source and target must have one shape, got {source.shape} and {target.shape}"
        )
    every = list(_pieces(source, target))
    mine = target.of(rank)
    sends = [p for p in every if p.src == rank != p.dst]
    receives = [p for p in every if p.dst == rank != p.src]
    keeps = [p for p in every if p.src == p.dst == rank]
    reached = {p.dst_tile for p in receives + keeps}
    fills = [i for i in mine if i not in reached and not target.tiles[i].box.empty]
    ranks = tuple(sorted({*source.ranks, *target.ranks}))
    moved = any(p.src != p.dst for p in every)
    return Plan(
        rank,
        source,
        target,
        tuple(sorted(sends, key=lambda p: (p.dst, p.dst_tile, p.term, p.box.offsets))),
        tuple(sorted(receives, key=lambda p: (p.src, p.dst_tile, p.term, p.box.offsets))),
        tuple(sorted(keeps, key=lambda p: (p.dst_tile, p.term, p.box.offsets))),
        tuple(fills),
        Collective("all_to_all" if moved else "none", ranks),
    )


def _pieces(source: Tiling, target: Tiling) -> Iterable[Piece]:
    by_term = _by_term(source, target)
    for s, tile in enumerate(source.tiles):
        term = source.term_of(s)
        wanted = 0
        for d, part in enumerate(target.tiles):
            if target.term_of(d) != (term if by_term else 0):
                continue
            box = tile.box.intersection(part.box)
            for dst in part.owners if box is not None else ():
                assert box is not None
                src = dst if dst in tile.owners else tile.owners[(s + wanted) % len(tile.owners)]
                wanted += src != dst
                yield Piece(box, src, dst, s, d, term)


def _by_term(source: Tiling, target: Tiling) -> bool:
    """Whether each term is moved on its own, and nothing reduced."""
    same = source.reduce_op == target.reduce_op and len(source.terms) == len(target.terms)
    return len(source.terms) > 1 and same
