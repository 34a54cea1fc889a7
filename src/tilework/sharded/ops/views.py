"""Parts of a tensor, and the same elements in another shape: views of the tiles.

Each tile becomes the box that it is of the result, on the rank where it is; nothing is
communicated. Sharded dims can be narrowed, moved and split; they merge with dims that follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilework.layout import Box
from tilework.layout.box import Ints
from tilework.sharded.metadata import ShardMetadata
from tilework.sharded.ops.result_layout import (
    ResultLayout,
    cached,
    layout_of_boxes,
    layout_of_result,
    of_tiles,
)
from tilework.sharded.ops.tiles import graph_tiles, wrap
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.box_propagation import within
from tilework.tiled.factors import Factor, FactorMap, dim_factors, factors_of
from tilework.tiled.regroup import regrouped

#: What a view does to one tile, called with the tile and the size of its result.
_View = Callable[[Tensor, Ints], Tensor]


def _without(numbers: Sequence[int], dim: int) -> Ints:
    return (*numbers[:dim], *numbers[dim + 1 :])


def _with(numbers: Sequence[int], dim: int, value: int) -> Ints:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def alias(tensor: ShardedTensor) -> ShardedTensor:
    """The same elements, as another tensor."""
    return wrap(tensor, [tile.view_as(tile) for tile in graph_tiles(tensor)])


def _rearranged(
    tensor: ShardedTensor,
    key: tuple[object, ...],
    make: Callable[[], FactorMap],
    size: Sequence[int],
    view: _View,
) -> ShardedTensor | None:
    """A view by a factor map; None where a tile would be no box of the result."""
    layout = layout_of_result(tensor, key, make, lambda: size)
    if layout is None:
        return None
    return of_tiles(tensor, layout, lambda tile, _, sizes: view(tile, sizes))


def permute(tensor: ShardedTensor, order: Ints) -> ShardedTensor:
    """The dims in another order."""

    def make() -> FactorMap:
        factors = factors_of(tensor.shape)
        return _moves(factors, [factors[dim] for dim in order])

    size = [tensor.shape[dim] for dim in order]
    result = _rearranged(tensor, ("permute", order), make, size, lambda x, _: x.permute(order))
    assert result is not None
    return result


def _moves(dims: Sequence[Factor | None], out: Sequence[Factor | None]) -> FactorMap:
    return FactorMap((dim_factors(dims),), (dim_factors(out),), rearranges=True)


def unsqueeze(tensor: ShardedTensor, dim: int) -> ShardedTensor:
    """A new dim of one element."""

    def make() -> FactorMap:
        factors = factors_of(tensor.shape)
        return _moves(factors, [*factors[:dim], None, *factors[dim:]])

    size = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    result = _rearranged(tensor, ("unsqueeze", dim), make, size, lambda x, _: x.unsqueeze(dim))
    assert result is not None
    return result


def expand(tensor: ShardedTensor, size: Ints) -> ShardedTensor | None:
    """Dims of one element repeated, without memory; None if a tile has nothing of one."""

    def make() -> FactorMap:
        out = factors_of(size)
        own = out[len(size) - tensor.dim() :]
        kept = zip(own, tensor.shape, strict=True)
        return _moves([factor if factor.size == n else None for factor, n in kept], out)

    return _rearranged(tensor, ("expand", size), make, size, lambda x, sizes: x.expand(sizes))


def reshape(tensor: ShardedTensor, size: Ints) -> ShardedTensor | None:
    """The same elements in another shape; None where a tile would be no box of it."""
    if tensor.numel() == 0:
        return None

    def make() -> FactorMap:
        befores, afters = regrouped(tensor.shape, size)
        return FactorMap((tuple(befores),), (tuple(afters),), rearranges=True)

    return _rearranged(tensor, ("reshape", size), make, size, lambda x, sizes: x.reshape(sizes))


def narrow(tensor: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    """``length`` elements along a dim, from ``start``; tiles without any of them become empty."""

    def make() -> ResultLayout:
        boxes = []
        for box in _boxes(tensor):
            begin, count = within(box, dim, start, length)
            boxes.append(Box(_with(box.offsets, dim, begin), _with(box.sizes, dim, count)))
        return layout_of_boxes(tensor, _with(tensor.shape, dim, length), boxes)

    def apply(tile: Tensor, shard: ShardMetadata, sizes: Ints) -> Tensor:
        begin, count = within(shard.box, dim, start, length)
        first = begin + start - shard.shard_offsets[dim]
        return tile.narrow(dim, min(max(first, 0), shard.shard_sizes[dim]), count)

    return of_tiles(tensor, cached(tensor, ("narrow", dim, start, length), make), apply)


def select(tensor: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    """One element along a dim, without the dim; ranks that have nothing of it hold no shards."""

    def make() -> ResultLayout:
        boxes = [
            Box(_without(box.offsets, dim), _without(box.sizes, dim))
            if box.offsets[dim] <= index < box.offsets[dim] + box.sizes[dim]
            else None
            for box in _boxes(tensor)
        ]
        return layout_of_boxes(tensor, _without(tensor.shape, dim), boxes)

    def apply(tile: Tensor, shard: ShardMetadata, sizes: Ints) -> Tensor:
        return tile.select(dim, index - shard.shard_offsets[dim])

    return of_tiles(tensor, cached(tensor, ("select", dim, index), make), apply)


def _boxes(tensor: ShardedTensor) -> list[Box]:
    return [shard.box for shard in tensor._metadata.shards_metadata]
