"""The collective that is equivalent to a plan, recognised from both tilings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tilework.layout.box import Ints
from tilework.layout.cost import DEFAULT_COST
from tilework.layout.tile_transfers import TileTransfers
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


@dataclass(frozen=True, slots=True)
class Collective:
    """The collective that moves the same elements as a plan, and the ranks that take part.

    ``kind`` is the same on every rank. Ranks that exchange nothing with each other may be in
    separate groups, and each group runs the collective by itself. all_to_all always runs in one
    group of all ranks.
    """

    kind: Kind
    """The kind of collective, the same on every rank."""
    ranks: Ints
    """The ranks that take part together with this rank, ascending; empty if it takes no part."""
    root: int | None = None
    """The global rank that has everything before (broadcast, scatter) or afterwards (gather). None
    for other kinds, and on a rank that takes no part."""


Groups = dict[int, tuple[Ints, int | None]]


def collective_of(source: Tiling, target: Tiling, rank: int) -> Collective:
    """The collective that moves a tensor, of one kind on all ranks, with the group of ``rank``."""
    kind, groups = _recognise(source, target)
    return Collective(kind, *groups.get(rank, ((), None)))


@lru_cache(maxsize=32)
def _recognise(source: Tiling, target: Tiling) -> tuple[Kind, Groups]:
    ranks = tuple(sorted({*source.ranks, *target.ranks}))
    if source == target or _nothing_moves(source, target):
        return "none", {rank: ((rank,), None) for rank in ranks}
    for recognise in (_all_gather, _scatter, _gather, _reduction):
        try:
            return recognise(_Ends(source, target, ranks))
        except _Mismatch:
            continue
    return "all_to_all", dict.fromkeys(ranks, (ranks, None))


def _nothing_moves(source: Tiling, target: Tiling) -> bool:
    transfers = TileTransfers(source, target, DEFAULT_COST)
    return all(
        rank in source.tiles[s].owners
        for d, tile in enumerate(target.tiles)
        for s in transfers.sources(d)
        for rank in tile.owners
    )


class _Mismatch(Exception):
    """Raised while a kind of collective is tried: the plans are not equivalent to it."""


def _require(condition: bool) -> None:
    if not condition:
        raise _Mismatch


@dataclass(frozen=True, slots=True)
class _Ends:
    """The tilings before and afterwards. Each rank has at most one tile with elements in either."""

    source: Tiling
    target: Tiling
    #: The global ranks that hold tiles in either tiling, ascending.
    ranks: Ints

    def has(self, rank: int) -> int | None:
        return _only_tile(self.source, rank)

    def wants(self, rank: int) -> int | None:
        return _only_tile(self.target, rank)

    def copy(self, rank: int) -> int:
        """The place of a rank among the owners of the source tile that it has; 0 without a tile."""
        s = self.has(rank)
        return 0 if s is None else self.source.tiles[s].owners.index(rank)


def _only_tile(tiling: Tiling, rank: int) -> int | None:
    """The index of a rank's only tile with elements, or of the first empty tile, or None."""
    tiles = tiling.of(rank)
    if len(tiles) > 1:
        tiles = tuple([i for i in tiles if not tiling.tiles[i].box.empty]) or tiles[:1]
        _require(len(tiles) == 1)
    return tiles[0] if tiles else None


def _all_gather(ends: _Ends) -> tuple[Kind, Groups]:
    source, target = ends.source, ends.target
    _require(len(source.terms) == len(target.terms) == 1)
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in ends.ranks:
        s, d = ends.has(rank), ends.wants(rank)
        if d is None:
            raise _Mismatch
        _require(s is None or target.tiles[d].box.contains(source.tiles[s].box))
        members[d, ends.copy(rank)].append(rank)
    groups: Groups = {}
    with_root = True
    for (d, _), group in members.items():
        held = {r: s for r in group if (s := ends.has(r)) is not None and _filled(source, s)}
        _require(_make_up(source, held.values(), target.tiles[d].box.volume))
        with_root = with_root and len(held) == 1
        groups |= dict.fromkeys(group, (tuple(group), next(iter(held), None)))
    if with_root:
        return "broadcast", groups
    return "all_gather", {rank: (group, None) for rank, (group, _) in groups.items()}


def _scatter(ends: _Ends) -> tuple[Kind, Groups]:
    return "scatter", _from_one(ends)


def _gather(ends: _Ends) -> tuple[Kind, Groups]:
    return "gather", _from_one(_Ends(ends.target, ends.source, ends.ranks))


def _from_one(ends: _Ends) -> Groups:
    """The groups of a scatter; for a gather, ``ends`` has source and target exchanged."""
    source, target = ends.source, ends.target
    _require(len(source.terms) == len(target.terms) == 1)
    members: defaultdict[int, set[int]] = defaultdict(set)
    for rank in ends.ranks:
        s, d = ends.has(rank), ends.wants(rank)
        if s is not None and _filled(source, s):
            _require(len(source.tiles[s].owners) == 1)
            members[s].add(rank)
        if d is not None and _filled(target, d):
            holding = source.overlapping(0, target.tiles[d].box)
            _require(len(target.tiles[d].owners) == len(holding) == 1)
            _require(s in holding or s is None or not _filled(source, s))
            members[holding[0]].add(rank)
    if len(members) == 1:
        return dict.fromkeys(ends.ranks, (ends.ranks, source.tiles[next(iter(members))].owners[0]))
    groups: Groups = {}
    for s, group in members.items():
        groups |= dict.fromkeys(group, (tuple(sorted(group)), source.tiles[s].owners[0]))
    return groups


def _reduction(ends: _Ends) -> tuple[Kind, Groups]:
    """The groups of an all_reduce or reduce_scatter: ranks with all terms of one box."""
    source, target = ends.source, ends.target
    _require(len(source.terms) > 1 and len(target.terms) == 1)
    members: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank in ends.ranks:
        s, d = ends.has(rank), ends.wants(rank)
        if s is None or d is None:
            raise _Mismatch
        _require(source.tiles[s].box.contains(target.tiles[d].box))
        term = source.term_of(s)
        members[s - source.term_starts[term], ends.copy(rank)].append((rank, s, d))
    groups: Groups = {}
    all_of_it, parts = True, True
    for group in members.values():
        ranks, has, wants = zip(*group, strict=True)
        box = source.tiles[has[0]].box
        _require({source.term_of(s) for s in has} == set(range(len(source.terms))))
        _require(all(source.tiles[s].box == box for s in has))
        all_of_it = all_of_it and all(target.tiles[d].box.volume == box.volume for d in wants)
        filled = [d for d in wants if _filled(target, d)]
        parts = parts and _make_up(target, filled, box.volume)
        groups |= dict.fromkeys(ranks, (ranks, None))
    _require(all_of_it or parts)
    return "all_reduce" if all_of_it else "reduce_scatter", groups


def _filled(tiling: Tiling, tile: int) -> bool:
    return not tiling.tiles[tile].box.empty


def _make_up(tiling: Tiling, tiles: Collection[int], volume: int) -> bool:
    """True if no tile is named twice, and the tiles have ``volume`` elements in total."""
    return len(set(tiles)) == len(tiles) and volume == sum(
        [tiling.tiles[tile].box.volume for tile in tiles]
    )
