"""Factor maps evaluated on boxes: whether an operator is local to tiles, and the results' boxes.

An operator is local to tiles if each tile of a result is computed from one tile of each input: no
sharded factor is unshardable, or missing in a result. Pure values: no tensors, no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from tilework.layout import Box, Tiling
from tilework.layout.internal import Ints, trusted_box
from tilework.tiled.factors import Dim, Factor, FactorMap, volume

#: The start and the size of a part.
Range = tuple[int, int]
#: The parts of factors that a tile has; it has all of a factor that is missing here.
Ranges = dict[Factor, Range]


class Obstacle(Enum):
    """Reasons why an operator is not local to tiles."""

    UNSHARDABLE = "the dim is sharded, and each tile needs all of it"
    REDUCED = "the dim is sharded, and reduced"
    UNALIGNED = "the dim is split, and tiles begin or end within one of its inner dims"
    SCATTERED = "dims are merged, of which another than the first is sharded"
    MISMATCHED = "tiles of the inputs are different parts, or on different ranks"


@dataclass(frozen=True)
class NotLocal:
    """An operator cannot run tile by tile, because of a dim of an input, if a single one."""

    obstacle: Obstacle
    dim: int | None = None


@dataclass(frozen=True, eq=False)
class LocalOp:
    """An operator that runs tile by tile, and each tile's ranges of the divided factors."""

    map: FactorMap
    inputs: Sequence[Tiling]
    tiles: tuple[Ranges, ...]

    def boxes(self, output: int = 0, shape: Sequence[int] | None = None) -> tuple[Box, ...]:
        dims = self.map.outputs[output]
        sizes = shape_of(dims) if shape is None else tuple(shape)
        return tuple([_box(dims, sizes, ranges) for ranges in self.tiles])


@dataclass(frozen=True, slots=True)
class TileShape:
    """The global shape of a tensor, and the shape of a tile."""

    shape: Ints
    local_shape: Ints


@dataclass(frozen=True, eq=False)
class TileRanges:
    """The ranges of factors that one tile runs over: LocalRanges of a tile."""

    op: LocalOp
    tile: int

    @property
    def inputs(self) -> list[TileShape]:
        return [TileShape(x.shape, x.tiles[self.tile].box.sizes) for x in self.op.inputs]

    @property
    def outputs(self) -> list[TileShape]:
        ranges = self.op.tiles[self.tile]
        shapes = [(dims, shape_of(dims)) for dims in self.op.map.outputs]
        return [TileShape(shape, _box(dims, shape, ranges).sizes) for dims, shape in shapes]

    @property
    def has_empty_shards(self) -> bool:
        return any(tile.box.empty for tiling in self.op.inputs for tile in tiling.tiles)

    def local_range(self, factor: Factor) -> Range:
        return self.op.tiles[self.tile].get(factor, (0, factor.size))

    def local_size(self, dim: Dim) -> int:
        return math.prod([self.local_range(factor)[1] for factor in dim])

    def is_sharded(self, factor: Factor) -> bool:
        return any(factor in ranges for ranges in self.op.tiles)


def shape_of(dims: Sequence[Dim]) -> Ints:
    """The sizes of dims that run over these factors; 1 for a dim without factors."""
    return tuple([volume(dim) for dim in dims])


def _box(dims: Sequence[Dim], shape: Ints, ranges: Ranges) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, factors in enumerate(dims):
        for at, factor in enumerate(factors):
            if factor in ranges:  # the outermost factor that is not of size 1
                start, size = ranges[factor]
                inner = volume(factors[at + 1 :])
                offsets[dim], sizes[dim] = start * inner, size * inner
    return trusted_box(tuple(offsets), tuple(sizes))


def propagate_boxes(mapped: FactorMap, inputs: Sequence[Tiling]) -> LocalOp | NotLocal:
    """Find out from the factor map and the inputs' tilings if an operator can run tile by tile.

    Tiles with the same number are computed together: each input must have as many tiles as the
    first, on the same ranks, and with the same parts of factors.
    """
    ranges: list[list[Ranges]] = []
    for number, tiling in enumerate(inputs):
        of_input: list[Ranges] = [{} for _ in tiling.tiles]
        for dim in range(len(tiling.shape)):
            obstacle = _restrict(of_input, mapped, number, tiling, dim)
            if obstacle is not None:
                return NotLocal(obstacle, dim)
        ranges.append(of_input)
    owners = [[tile.owners for tile in tiling.tiles] for tiling in inputs]
    if any(each != owners[0] for each in owners):
        return NotLocal(Obstacle.MISMATCHED)
    tiles = [dict(chain(*map(dict.items, of_tile))) for of_tile in zip(*ranges, strict=True)]
    local = LocalOp(mapped, inputs, tuple(tiles))
    fit = len(inputs) == 1 or (_fit(local) and _covers(local))
    return local if fit else NotLocal(Obstacle.MISMATCHED)


def _covers(local: LocalOp) -> bool:
    return all(
        sum([box.volume for box in local.boxes(number)]) == math.prod(shape_of(dims))
        for number, dims in enumerate(local.map.outputs)
    )


def _restrict(
    tiles: list[Ranges], mapped: FactorMap, number: int, tiling: Tiling, dim: int
) -> Obstacle | None:
    extent, factors = tiling.shape[dim], mapped.inputs[number][dim]
    if factors and volume(factors) != extent:
        return Obstacle.MISMATCHED
    if not factors and extent == 1:
        factors = _squeezed_into(mapped, tiling)
    at = next((at for at, factor in enumerate(factors) if factor.size != 1), 0)
    inner = volume(factors[at + 1 :])
    for ranges, tile in zip(tiles, tiling.tiles, strict=True):
        start, size = tile.box.offsets[dim], tile.box.sizes[dim]
        if size == extent:
            continue
        if not factors:
            return Obstacle.UNSHARDABLE
        obstacle = _obstacle(mapped, factors[at])
        if obstacle is not None:
            return obstacle
        if start % inner or size % inner:
            return Obstacle.UNALIGNED
        if ranges.get(factors[at], (0, 1))[1]:  # else the tile is empty because of another dim
            ranges[factors[at]] = start // inner, size // inner
    return None


def _squeezed_into(mapped: FactorMap, tiling: Tiling) -> Dim:
    """The factor that a tile leaves empty if it is empty along a dropped dim of size 1."""
    results = [math.prod(shape_of(dims)) for dims in mapped.outputs]
    if not mapped.rearranges or results != [math.prod(tiling.shape)]:
        return ()
    factors = [factor for dim in mapped.outputs[0] for factor in dim if factor.size != 1]
    return tuple(factors[:1])


def _obstacle(mapped: FactorMap, factor: Factor) -> Obstacle | None:
    """The obstacle if tiles have different parts of a factor; None if there is none."""
    if factor.unshardable:
        return Obstacle.UNSHARDABLE
    for dims in mapped.outputs:
        dim = next((dim for dim in dims if factor in dim), None)
        if dim is None:
            return Obstacle.REDUCED
        if any(outer.size != 1 for outer in dim[: dim.index(factor)]):
            return Obstacle.SCATTERED
    return None


def _fit(local: LocalOp) -> bool:
    """True if each tile of each input is exactly the part that the ranges of factors give."""
    return all(
        _box(dims, tiling.shape, ranges) == tile.box
        for dims, tiling in zip(local.map.inputs, local.inputs, strict=True)
        for ranges, tile in zip(local.tiles, tiling.tiles, strict=True)
    )


def within(box: Box, dim: int, start: int, length: int) -> Range:
    """The part of a box in a range along a dim, counted from the range's start."""
    begin = min(max(box.offsets[dim] - start, 0), length)
    end = max(min(box.offsets[dim] + box.sizes[dim] - start, length), begin)
    return begin, end - begin
