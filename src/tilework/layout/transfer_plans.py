"""Transfer plans of both kinds of tensor; small plans are cached, as training repeats transfers."""

from __future__ import annotations

from functools import lru_cache

from tilework.layout import Box, Plan, Tile, Tiling, plan

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
