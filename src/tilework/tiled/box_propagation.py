"""Factor maps evaluated on boxes: is an operator local to tiles, and which boxes are its results?

An operator is local to tiles if each tile of a result is computed from one tile of each input. So
no factor that a tile lacks a part of may be unshardable, or missing in a result. Values only: no
ranks' memory, nothing that communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tilework.layout import Box, Tiling
from tilework.layout.box import Ints, trusted_box
from tilework.tiled.factors import Dim, Factor, FactorMap, volume

#: The start and the size of a part.
Range = tuple[int, int]
#: The parts of factors that a tile has; of those that are missing it has all.
Ranges = dict[Factor, Range]


class Obstacle(Enum):
    """Why an operator is not local to tiles."""

    UNSHARDABLE = "the dim is sharded, and each tile needs all of it"
    REDUCED = "the dim is sharded, and reduced"
    UNALIGNED = "the dim is split, and tiles begin or end within one of its inner dims"
    SCATTERED = "dims are merged, of which another than the first is sharded"
    MISMATCHED = "tiles of the inputs are different parts, or on different ranks"


@dataclass(frozen=True)
class NotLocal:
    """An operator cannot run tile by tile.

    Args:
        obstacle: Why.
        input: The number of the input that it is about.
        dim: The first of its dims that is in the way; None if there is no single one.
    """

    obstacle: Obstacle
    input: int
    dim: int | None


@dataclass(frozen=True, eq=False)
class LocalOp:
    """An operator runs tile by tile.

    Args:
        map: What it does to dims.
        tiles: For each tile the ranges of the factors that it has only a part of; None for one
            without elements along a dim of size 1 that the result lacks: its result is empty.
    """

    map: FactorMap
    tiles: tuple[Ranges | None, ...]

    def boxes(self, output: int = 0, shape: Sequence[int] | None = None) -> tuple[Box, ...]:
        """The box of each tile's result.

        Args:
            output: The number of the result.
            shape: Its global shape; None: as its factors say, 1 for a dim without any.

        Example:
            >>> from tilework.layout import Tile
            >>> row, column = Factor(4), Factor(3)
            >>> transpose = FactorMap((((row,), (column,)),), (((column,), (row,)),))
            >>> upper, lower = Tile(Box((0, 0), (1, 3)), (0,)), Tile(Box((1, 0), (3, 3)), (1,))
            >>> local = propagate_boxes(transpose, [Tiling.of_tiles((4, 3), [upper, lower])])
            >>> [str(box) for box in local.boxes()]
            ['[0:3, 0:1]', '[0:3, 1:4]']
        """
        dims = self.map.outputs[output]
        sizes = shape_of(dims) if shape is None else tuple(shape)
        return tuple([_box(dims, sizes, ranges) for ranges in self.tiles])


def shape_of(dims: Sequence[Dim]) -> Ints:
    """The sizes of dims that run over these factors; 1 for a dim without any."""
    return tuple([volume(dim) for dim in dims])


def _box(dims: Sequence[Dim], shape: Ints, ranges: Ranges | None) -> Box:
    if ranges is None:
        return trusted_box((0,) * len(shape), (0, *shape[1:]))
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, factors in enumerate(dims):
        for at, factor in enumerate(factors):
            if factor in ranges:  # the outermost that is not of size 1
                start, size = ranges[factor]
                inner = volume(factors[at + 1 :])
                offsets[dim], sizes[dim] = start * inner, size * inner
    return trusted_box(tuple(offsets), tuple(sizes))


def propagate_boxes(mapped: FactorMap, inputs: Sequence[Tiling]) -> LocalOp | NotLocal:
    """How an operator runs tile by tile; or why it does not.

    Tiles with one number are computed together, so all inputs must have as many, each on the same
    ranks as those of the first input, and all the same part of a factor.

    Args:
        mapped: What the operator does to dims.
        inputs: How each of its inputs is tiled, none of them partial.
    """
    ranges: list[list[Ranges | None]] = []
    for number, tiling in enumerate(inputs):
        of_input: list[Ranges | None] = [{} for _ in tiling.tiles]
        for dim in range(len(tiling.shape)):
            obstacle = _restrict(of_input, mapped, number, tiling, dim)
            if obstacle is not None:
                return NotLocal(obstacle, number, dim)
        ranges.append(of_input)
    owners = [tile.owners for tile in inputs[0].tiles]
    for number, tiling in enumerate(inputs):
        if [tile.owners for tile in tiling.tiles] != owners:
            return NotLocal(Obstacle.MISMATCHED, number, None)
    tiles = [_merged(of_tile) for of_tile in zip(*ranges, strict=True)]
    for number, tiling in enumerate(inputs[1:], 1):
        if not _fits(mapped.inputs[number], tiling, tiles):
            return NotLocal(Obstacle.MISMATCHED, number, None)
    if len(inputs) > 1 and not _fits(mapped.inputs[0], inputs[0], tiles):
        return NotLocal(Obstacle.MISMATCHED, 0, None)
    return LocalOp(mapped, tuple(tiles))


def _restrict(
    tiles: list[Ranges | None], mapped: FactorMap, number: int, tiling: Tiling, dim: int
) -> Obstacle | None:
    """Note the ranges of factors that tiles have along a dim; the obstacle if that cannot be."""
    extent, factors = tiling.shape[dim], mapped.inputs[number][dim]
    if factors and volume(factors) != extent:
        return Obstacle.MISMATCHED
    at = next((at for at, factor in enumerate(factors) if factor.size != 1), 0)
    inner = volume(factors[at + 1 :])
    for i, tile in enumerate(tiling.tiles):
        start, size = tile.box.offsets[dim], tile.box.sizes[dim]
        if size == extent:
            continue
        if not factors:
            if extent != 1 or not _keeps_elements(mapped, tiling):
                return Obstacle.UNSHARDABLE
            tiles[i] = None
            continue
        obstacle = _obstacle(mapped, factors[at])
        if obstacle is not None:
            return obstacle
        if start % inner or size % inner:
            return Obstacle.UNALIGNED
        ranges = tiles[i]
        if ranges is not None:
            ranges[factors[at]] = start // inner, size // inner
    return None


def _keeps_elements(mapped: FactorMap, tiling: Tiling) -> bool:
    """True if results have each element once, so that those of an empty tile are empty."""
    results = [math.prod(shape_of(dims)) for dims in mapped.outputs]
    return mapped.rearranges and results == [math.prod(tiling.shape)]


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


def _merged(of_inputs: Sequence[Ranges | None]) -> Ranges | None:
    """The ranges of one tile, from those of each input."""
    merged: Ranges = {}
    for ranges in of_inputs:
        if ranges is None:
            return None
        merged.update(ranges)
    return merged


def _fits(dims: Sequence[Dim], tiling: Tiling, tiles: Sequence[Ranges | None]) -> bool:
    """True if an input's tiles are the parts that these ranges make of it."""
    return all(
        ranges is None or _box(dims, tiling.shape, ranges) == tile.box
        for ranges, tile in zip(tiles, tiling.tiles, strict=True)
    )


def within(box: Box, dim: int, start: int, length: int) -> Range:
    """The part of a box in a range along a dim, counted from the range's start.

    Example:
        >>> within(Box((4,), (3,)), 0, 5, 10), within(Box((0,), (3,)), 0, 5, 10)
        ((0, 2), (0, 0))
    """
    begin = min(max(box.offsets[dim] - start, 0), length)
    end = max(min(box.offsets[dim] + box.sizes[dim] - start, length), begin)
    return begin, end - begin
