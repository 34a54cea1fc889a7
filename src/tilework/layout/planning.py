"""Plans: the boxes that a rank sends, receives and keeps to get from one tiling to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from tilework.layout.box import Ints
from tilework.layout.collective import Collective, collective_of
from tilework.layout.cost import DEFAULT_COST, CostModel
from tilework.layout.tile_transfers import Piece, TileTransfers, keeps_terms
from tilework.layout.tiling import Tiling

#: The maximum of peers in a printed plan, in each direction.
_MOST_PEERS = 10
#: The order of the pieces that two ranks exchange; parts of a piece keep their order.
_PLACE = ("dst_tile", "src_tile")


@dataclass(frozen=True)
class Plan:
    """The part of one rank in moving a tensor from tiling ``source`` to tiling ``target``.

    Two ranks exchange pieces in the same order: by target tile, source tile (so that terms ascend),
    and start.
    """

    rank: int
    """The rank whose part this is."""
    source: Tiling
    """The tiling before."""
    target: Tiling
    """The tiling afterwards."""
    sends: tuple[Piece, ...]
    """The pieces to other ranks, by receiver, ascending."""
    receives: tuple[Piece, ...]
    """The pieces from other ranks, by sender, ascending."""
    keeps: tuple[Piece, ...]
    """The pieces copied from the rank's own tiles."""
    fills: Ints
    """The target tiles of this rank that no piece reaches, because a partial target's value is in
    other terms: they get the identity element of the target's reduction."""
    collective: Collective
    """The collective that is equivalent to all ranks' plans."""

    @cached_property
    def reduces(self) -> bool:
        """True if each target tile gets all terms of the source and combines them, in order."""
        return len(self.source.terms) > 1 and not keeps_terms(self.source, self.target)

    def __str__(self) -> str:
        """A summary, and a line for each peer; :func:`plan_all_ranks` shows all ranks."""
        moved = zip(("sends", "receives"), (self.sends, self.receives), ("to", "from"), strict=True)
        lines = [f"{self.collective.kind}: rank {self.rank}'s part"]
        for verb, pieces, preposition in moved:
            by_peer: dict[int, list[Piece]] = {}
            for piece in pieces:
                by_peer.setdefault(piece.dst if verb == "sends" else piece.src, []).append(piece)
            for peer, shared in list(by_peer.items())[:_MOST_PEERS]:
                elements = sum(piece.box.volume for piece in shared)
                more = f" and {len(shared) - 1} more boxes" if len(shared) > 1 else ""
                box = f"{shared[0].box}{more}"
                lines.append(f"  {verb} {elements:,} elements {preposition} rank {peer}: {box}")
            if len(by_peer) > _MOST_PEERS:
                lines.append(f"  {verb} {preposition} {len(by_peer) - _MOST_PEERS} more ranks")
        kept = sum(piece.box.volume for piece in self.keeps)
        return "\n".join([*lines, f"  copies {kept:,} local elements"])

    def bytes_sent(self, itemsize: int) -> int:
        """The bytes that go to others, with ``itemsize`` bytes per element."""
        return itemsize * sum([piece.box.volume for piece in self.sends])

    def bytes_received(self, itemsize: int) -> int:
        """The bytes that come from others, with ``itemsize`` bytes per element."""
        return itemsize * sum([piece.box.volume for piece in self.receives])


def plan(source: Tiling, target: Tiling, rank: int, cost: CostModel | None = None) -> Plan:
    """The part of ``rank`` in moving a tensor from tiling ``source`` to tiling ``target``.

    Every rank plans for itself, nothing is communicated, and all plans fit together. A rank
    receives only the pieces that it lacks. Where several ranks hold a piece, one of them sends it,
    if possible a rank on the receiver's host, and these ranks share the work.

    The terms of a partial source meet at the receiver, to be reduced there in order (``reduces``).
    The first term of a partial target gets the value, and the others the identity element of the
    reduction (``fills``); with "avg" all terms get the value. But if both are partial, with equally
    many terms and the same reduction, terms are moved separately and nothing is reduced.

    Args:
        source: The tiling before.
        target: The tiling afterwards; of the same shape.
        rank: The global rank whose part is planned; it may have no part.
        cost: The cost of messages, and which ranks share a host. The same on every rank.

    Raises:
        ValueError: The shapes differ.
        NotImplementedError: The target is partial with a reduction without an identity element.

    Example:
        >>> from tilework.layout import Shard, mesh_tiling
        >>> rows = mesh_tiling((4, 4), [0, 1], [Shard(0)])
        >>> columns = mesh_tiling((4, 4), [0, 1], [Shard(1)])
        >>> [(str(piece.box), piece.dst) for piece in plan(rows, columns, rank=0).sends]
        [('[0:2, 2:4]', 1)]
    """
    return plan_of(transfers_between(source, target, cost), rank)


def transfers_between(source: Tiling, target: Tiling, cost: CostModel | None) -> TileTransfers:
    """The transfers from one tiling to another, from which each rank's plan is made.

    Raises:
        ValueError: The shapes differ.
    """
    if source.shape != target.shape:
        raise ValueError(
            f"a plan goes from one layout of a shape to another layout of the same shape, got "
            f"{source.shape} and {target.shape}"
        )
    return TileTransfers(source, target, DEFAULT_COST if cost is None else cost)


def plan_of(transfers: TileTransfers, rank: int) -> Plan:
    """The plan of ``rank``, made from the transfers between two tilings."""
    source, target = transfers.source, transfers.target
    got = list(transfers.received_by(rank))
    receives = [piece for piece in got if piece.src != rank]
    return Plan(
        rank,
        source,
        target,
        tuple(sorted(transfers.sent_by(rank), key=attrgetter("dst", *_PLACE))),
        tuple(sorted(receives, key=attrgetter("src", *_PLACE))),
        tuple(sorted([piece for piece in got if piece.src == rank], key=attrgetter(*_PLACE))),
        tuple([d for d in target.of(rank) if _is_filled(target, d, transfers.valued)]),
        collective_of(source, target, rank),
    )


def _is_filled(target: Tiling, tile: int, valued: range) -> bool:
    return target.term_of(tile) not in valued and not target.tiles[tile].box.empty
