"""Transfer plans of both kinds of tensor; small ones are cached: training repeats its moves."""

from __future__ import annotations

from functools import lru_cache

from tilework.layout import Box, Plan, Tile, Tiling, plan

#: Plans between tilings of so many tiles are cached; more take longer to run than to plan.
_FEW_TILES = 64
_cached_plan = lru_cache(maxsize=256)(plan)


@lru_cache(maxsize=256)
def replicated_tiling(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Tiling:
    """The tiling in which each of these ranks has the full tensor."""
    return Tiling.of_tiles(shape, [Tile(Box((0,) * len(shape), shape), ranks)])


def transfer_plan(source: Tiling, target: Tiling, rank: int) -> Plan:
    """The transfers of ``rank`` from one tiling to the other."""
    few = max(len(source.tiles), len(target.tiles)) <= _FEW_TILES
    return _cached_plan(source, target, rank) if few else plan(source, target, rank)
