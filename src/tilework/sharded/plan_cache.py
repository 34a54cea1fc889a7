"""What moves between layouts. What few ranks do is remembered: training repeats its moves."""

from __future__ import annotations

from functools import lru_cache

from tilework.layout import Box, Plan, Tile, Tiling, plan

#: Plans between tilings of so many tiles are remembered; more take longer to run than to plan.
_FEW_TILES = 64
_remembered = lru_cache(maxsize=256)(plan)


@lru_cache(maxsize=256)
def whole_on(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Tiling:
    """All of a tensor, on each of these ranks."""
    return Tiling.of_tiles(shape, [Tile(Box((0,) * len(shape), shape), ranks)])


def steps_between(source: Tiling, target: Tiling, rank: int) -> Plan:
    """What ``rank`` does to get from one layout to the other."""
    few = max(len(source.tiles), len(target.tiles)) <= _FEW_TILES
    return _remembered(source, target, rank) if few else plan(source, target, rank)
