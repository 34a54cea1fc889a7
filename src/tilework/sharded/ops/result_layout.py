"""Layouts of operators' results, cached by operator, layout of the operand and static arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tilework.comm.world import get_rank
from tilework.layout import Box
from tilework.layout.internal import Ints
from tilework.sharded.metadata import (
    Items,
    Shard,
    ShardedTensorMetadata,
    ShardMap,
    ShardMetadata,
)
from tilework.sharded.ops.tiles import emptied, graph_tiles, keep_stand_in
from tilework.sharded.specs import (
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)
from tilework.sharded.tensor import ShardedTensor
from tilework.sharded.wrap import wrap_shards

T = TypeVar("T")

#: The maximum of entries in the cache that tensors computed from one tensor share.
_MOST_CACHED = 1024


@dataclass(frozen=True, eq=False, slots=True)
class ResultLayout:
    """The layout of a result whose tiles are computed from a tensor's tiles, on the same ranks.

    Args:
        size: The result's shape.
        spec: The result's sharding spec.
        shards: All shards of the result.
        shard_map: The shards and their owners.
        numbers: For each tile of the tensor the number of the result's tile; None if there is
            none.
    """

    size: torch.Size
    spec: ShardingSpec
    shards: Items[ShardMetadata]
    shard_map: ShardMap
    numbers: tuple[int | None, ...]


def cached(tensor: ShardedTensor, key: Hashable, make: Callable[[], T]) -> T:
    """The result of ``make``, which depends only on the key and on the tensor's layout."""
    shard_map, shards = tensor._shard_map, tensor._metadata.shards_metadata
    entry = shard_map.results.get((shard_map, key))
    # Tensors with the same shard map have other placements after a move to another device.
    if entry is None or entry[0] is not shards:
        if len(shard_map.results) >= _MOST_CACHED:
            shard_map.results.clear()
        entry = shard_map.results[shard_map, key] = shards, make()
    result: T = entry[1]
    return result


def layout_of_boxes(
    tensor: ShardedTensor, size: Sequence[int], boxes: Sequence[Box | None]
) -> ResultLayout:
    """The layout of a result with these boxes, each on the rank of the tensor's tile.

    Args:
        tensor: The tensor.
        size: The size of the result.
        boxes: For each tile the result's box; None: nothing is left of the tile.
    """
    metadata = tensor._metadata
    shards: list[ShardMetadata] = []
    owners: list[int] = []
    numbers: list[int | None] = []
    for shard, owner, box in zip(metadata.shards_metadata, tensor.owners, boxes, strict=True):
        numbers.append(None if box is None else len(shards))
        if box is not None:
            shards.append(ShardMetadata(box.offsets, box.sizes, shard.placement))
            owners.append(owner)
    result = replace(metadata, shards_metadata=Items(shards), size=torch.Size(size))
    shard_map = ShardMap(result, owners, tensor._shard_map.results)
    return ResultLayout(
        result.size, _spec_of(result), result.shards_metadata, shard_map, tuple(numbers)
    )


def layout_of(tensor: ShardedTensor) -> ResultLayout:
    """The layout of the tensor."""
    shards = tensor._metadata.shards_metadata
    numbers = tuple(range(len(shards)))
    return ResultLayout(tensor.shape, tensor._sharding_spec, shards, tensor._shard_map, numbers)


def boxes_of(tensor: ShardedTensor) -> list[Box]:
    """The box of each of the tensor's shards."""
    return [shard.box for shard in tensor._metadata.shards_metadata]


def _spec_of(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """A chunk spec if the shards are chunks in order; else the boxes."""
    shards = metadata.shards_metadata
    spec = infer_sharding_spec_from_shards_metadata(shards)
    if spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata == shards:
        return spec
    return EnumerableShardingSpec(shards)


def of_tiles(
    tensor: ShardedTensor,
    layout: ResultLayout,
    apply: Callable[[Tensor, int, Ints], Tensor],
    stand_in: Tensor | None = None,
) -> ShardedTensor:
    """A tensor whose tiles are computed from another tensor's tiles, on the same ranks. Local.

    Args:
        tensor: The tensor.
        layout: The layout of the result.
        apply: Called with a tile, the tile's number and the size of the result; returns the result.
        stand_in: The result of this rank's stand-in, if there is one and the dtype changes.
    """
    local = []
    for i, shard in zip(tensor.tiling.of(get_rank()), tensor._local_shards, strict=True):
        number = layout.numbers[i]
        if number is not None:
            described = layout.shards[number]
            local.append(Shard(apply(shard.tensor, i, described.shard_sizes), described))
    if local:
        first = local[0].tensor
    else:
        source = graph_tiles(tensor)[0] if stand_in is None else stand_in
        first = emptied(source, len(layout.size))
    properties = replace(
        tensor._metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
    )
    metadata = ShardedTensorMetadata(layout.shards, layout.size, properties)
    result = wrap_shards(tensor, layout.spec, metadata, layout.shard_map, local)
    if not local:
        keep_stand_in(result, first)
    return result
