"""Layouts of results, evaluated from factor maps once for tensors that lie alike, and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tilework.comm.world import get_rank
from tilework.layout import Box
from tilework.layout.box import Ints
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

#: The most results that tensors which were made of one tensor remember together.
_MOST_KEPT = 1024


@dataclass(frozen=True, eq=False, slots=True)
class ResultLayout:
    """How a result lies whose tiles come from those of another tensor, on the same ranks.

    Args:
        size: Its shape.
        spec: How it is sharded.
        shards: All its shards.
        shard_map: Which rank holds which.
        numbers: For each tile of the other tensor the number of its result; None if it has none.
    """

    size: torch.Size
    spec: ShardingSpec
    shards: Items[ShardMetadata]
    shard_map: ShardMap
    numbers: tuple[int | None, ...]


def cached(tensor: ShardedTensor, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returns, which depends only on the key and on how the tensor lies."""
    shard_map, shards = tensor._shard_map, tensor._metadata.shards_metadata
    entry = shard_map.results.get((shard_map, key))
    # Placements may differ in tensors of one shard_map: those that were moved to another device.
    if entry is None or entry[0] is not shards:
        if len(shard_map.results) >= _MOST_KEPT:
            shard_map.results.clear()
        entry = shard_map.results[shard_map, key] = shards, make()
    found: T = entry[1]
    return found


def layout_of_boxes(
    tensor: ShardedTensor, size: Sequence[int], boxes: Sequence[Box | None]
) -> ResultLayout:
    """The layout whose shards are these boxes, each on the rank where the tensor's tile is.

    Args:
        tensor: The tensor.
        size: The result's.
        boxes: For each tile that of its result; None: nothing is left of it.
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
    whole = replace(metadata, shards_metadata=Items(shards), size=torch.Size(size))
    shard_map = ShardMap(whole, owners, tensor._shard_map.results)
    return ResultLayout(
        whole.size, _spec_of(whole), whole.shards_metadata, shard_map, tuple(numbers)
    )


def layout_of(tensor: ShardedTensor) -> ResultLayout:
    """The tensor's own layout."""
    shards = tensor._metadata.shards_metadata
    numbers = tuple(range(len(shards)))
    return ResultLayout(tensor.shape, tensor._sharding_spec, shards, tensor._shard_map, numbers)


def boxes_of(tensor: ShardedTensor) -> list[Box]:
    """The box of each of the tensor's shards."""
    return [shard.box for shard in tensor._metadata.shards_metadata]


def _spec_of(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """Chunks, if they come in that order; else the boxes."""
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
    """A tensor whose tiles are made from this one's, each on the rank where it is. Local.

    Args:
        tensor: The tensor.
        layout: The result's.
        apply: From a tile, its number and the size of its result to the result.
        stand_in: What came of this rank's stand-in, if it has one and the dtype changes.
    """
    local = []
    for i, shard in zip(tensor.tiling.of(get_rank()), tensor._local_shards, strict=True):
        number = layout.numbers[i]
        if number is not None:
            result = layout.shards[number]
            local.append(Shard(apply(shard.tensor, i, result.shard_sizes), result))
    if local:
        first = local[0].tensor
    else:
        source = graph_tiles(tensor)[0] if stand_in is None else stand_in
        first = emptied(source, len(layout.size))
    properties = replace(
        tensor._metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
    )
    metadata = ShardedTensorMetadata(layout.shards, layout.size, properties)
    made = wrap_shards(tensor, layout.spec, metadata, layout.shard_map, local)
    if not local:
        keep_stand_in(made, first)
    return made
