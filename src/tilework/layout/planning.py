"""Plans: the boxes that a rank sends, receives and keeps to get from one tiling to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter

from tilework.layout.box import Box, Ints
from tilework.layout.collective import Collective, Kind, collective_of
from tilework.layout.cost import DEFAULT_COST, CostModel
from tilework.layout.tile_transfers import Piece, TileTransfers, keeps_terms
from tilework.layout.tiling import Tile, Tiling
from tilework.show import Page, Shown, TextTable

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
    source: Tiling
    target: Tiling
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
    """The transfers from one tiling to another of the same shape."""
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
    filled = [d for d in target.of(rank) if not target.tiles[d].box.empty]
    receives = [piece for piece in got if piece.src != rank]
    return Plan(
        rank,
        source,
        target,
        tuple(sorted(transfers.sent_by(rank), key=attrgetter("dst", *_PLACE))),
        tuple(sorted(receives, key=attrgetter("src", *_PLACE))),
        tuple(sorted([piece for piece in got if piece.src == rank], key=attrgetter(*_PLACE))),
        tuple([d for d in filled if target.term_of(d) not in transfers.valued]),
        collective_of(source, target, rank),
    )


#: Plans up to this number of tiles are cached; larger ones run longer than planning takes.
_FEW_TILES = 64
_cached_plan = lru_cache(maxsize=256)(plan)


@lru_cache(maxsize=256)
def replicated_tiling(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Tiling:
    """The tiling in which each given rank has the full tensor."""
    return Tiling.of_tiles(shape, [Tile(Box((0,) * len(shape), shape), ranks)])


def transfer_plan(source: Tiling, target: Tiling, rank: int) -> Plan:
    """The plan of ``rank`` for moving a tensor from ``source`` to ``target``, cached if small."""
    few = max(len(source.tiles), len(target.tiles)) <= _FEW_TILES
    return _cached_plan(source, target, rank) if few else plan(source, target, rank)


#: The maximum of edges in a table, which shows the heaviest.
MOST_ROWS = 20


@dataclass(frozen=True)
class AllRanksPlan(Shown):
    """The plans of all ranks, for display, tests and predictions; by :func:`plan_all_ranks`.

    ``print`` shows it as a line and a table, and rich draws it.
    """

    plans: tuple[Plan, ...]
    """The plans of the ranks given to :func:`plan_all_ranks`, in the same order."""
    cost: CostModel = field(default_factory=CostModel)
    itemsize: int = 4
    """Bytes per element, for printing."""

    def edges(self, itemsize: int) -> dict[tuple[int, int], int]:
        """The bytes that each rank sends to each other, by (sender, receiver) in ascending order.

        Pairs of ranks that exchange nothing are left out.
        """
        return {edge: itemsize * volume for edge, volume in self._volumes.items()}

    def seconds(self, cost: CostModel | None = None, itemsize: int | None = None) -> float:
        """The predicted duration in seconds.

        The time of the busiest rank: all messages that it sends, one after the other, or all that
        it receives, whichever takes longer.
        """
        cost, itemsize = cost or self.cost, self.itemsize if itemsize is None else itemsize
        seconds: dict[tuple[str, int], float] = {}
        for (src, dst), nbytes in self.edges(itemsize).items():
            taken = cost.seconds(src, dst, nbytes)
            for end in (("sends", src), ("receives", dst)):
                seconds[end] = seconds.get(end, 0.0) + taken
        return max(seconds.values(), default=0.0)

    @property
    def kind(self) -> Kind:
        """The collective that is equivalent to the plans."""
        return self.plans[0].collective.kind if self.plans else "none"

    @cached_property
    def _volumes(self) -> dict[tuple[int, int], int]:
        volumes: Counter[tuple[int, int]] = Counter()
        for plan in self.plans:
            for piece in plan.sends:
                volumes[piece.src, piece.dst] += piece.box.volume
        return dict(sorted(volumes.items()))

    def __rich__(self) -> Page:
        edges = self.edges(self.itemsize)
        kept = self.itemsize * sum(p.box.volume for plan in self.plans for p in plan.keeps)
        summary = (
            f"{self.kind}: {sum(edges.values()):,} bytes between {len(self.plans):,} ranks, "
            f"{kept:,} copied in place, predicted {self.seconds() * 1e6:,.1f} us"
        )
        heaviest = sorted(edges, key=lambda edge: (-edges[edge], edge))[:MOST_ROWS]
        rows = []
        for src, dst in sorted(heaviest):
            nbytes = edges[src, dst]
            seconds = self.cost.seconds(src, dst, nbytes)
            rows.append((str(src), str(dst), f"{nbytes:,}", f"{seconds * 1e6:,.1f} us"))
        if rest := edges.keys() - set(heaviest):
            nbytes = sum(edges[edge] for edge in rest)
            rows.append(("…", f"{len(rest):,} more", f"{nbytes:,}", ""))
        return Page(summary, TextTable(("from", "to", "bytes", "predicted"), rows, range(4)))


def plan_all_ranks(
    source: Tiling,
    target: Tiling,
    ranks: Iterable[int] | None = None,
    cost: CostModel | None = None,
    itemsize: int = 4,
) -> AllRanksPlan:
    """The plans of ``ranks`` (None: all that hold tiles before or afterwards).

    Args:
        cost: As for :func:`plan`; also for predictions.
        itemsize: Bytes per element, for printing.

    Raises:
        ValueError: The shapes differ.
        NotImplementedError: The target is partial with a reduction without an identity element.

    Example: see docs/concepts/layout.md.
    """
    transfers = transfers_between(source, target, cost)
    if ranks is None:
        ranks = sorted({*source.ranks, *target.ranks})
    plans = tuple([plan_of(transfers, rank) for rank in ranks])
    return AllRanksPlan(plans, DEFAULT_COST if cost is None else cost, itemsize)
