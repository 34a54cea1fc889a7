"""A sharded tensor's values moved to another tiling, with gradients the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.operations.internal import run_plan
from tilework.comm.world import AnyGroup, NonMember, get_rank
from tilework.layout import Tiling
from tilework.layout.internal import transfer_plan
from tilework.sharded import checks
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.graph import graph_tiles, keep_stand_in
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, ShardMap
from tilework.sharded.placement import Place, check_rrefs, places
from tilework.sharded.specs import ShardingSpec


def has_values(tensor: ShardedTensorBase) -> bool:
    """True if the shards are on real devices, False if on the meta device; the same on every rank.

    Raises:
        ValueError: Only some shards are on the meta device.
    """
    places = [shard.placement for shard in tensor.metadata().shards_metadata]
    real = {place.device().type != "meta" for place in places if place is not None}
    if len(real) > 1:
        raise ValueError(
            "some shards are on the meta device, where there are no values to move: move the "
            "others there too, with to('meta')"
        )
    return real != {False}


def reshard(
    tensor: ShardedTensorBase,
    spec: ShardingSpec,
    *,
    init_rrefs: bool = False,
    through_autograd: bool = False,
) -> None:
    """Shard a tensor by another spec, in place. Collective over the tensor's group; blocks.

    Args:
        tensor: The tensor.
        spec: The new spec.
        init_rrefs: Whether the caller will make RRefs to the new shards; checked with the rest.
        through_autograd: Whether gradients flow back to the old tiles; else new tiles are leaves.
    """
    group = tensor._process_group

    def prepare() -> tuple[ShardedTensorMetadata, list[Place]]:
        check_rrefs(init_rrefs)
        before = tensor.metadata()
        metadata = checks.metadata_by(spec, before.size, before.tensor_properties)
        placed = places(group, metadata.shards_metadata)
        if not has_values(tensor) and any(device.type != "meta" for _, device in placed):
            raise ValueError(
                "reshard: a tensor on the meta device has no values to move elsewhere: make a new "
                "one, or reshard to placements on 'meta'"
            )
        return metadata, placed

    metadata, placed = checks.make_equal(
        prepare, lambda prepared: checks.describe(prepared[0]), "resharding_spec", group
    )
    shard_map = ShardMap(metadata, [owner for owner, _ in placed])
    tiles: list[Tensor] = []
    if not isinstance(group, NonMember):
        tiles = _new_tiles(tensor, shard_map.tiling, through_autograd)
    own = shard_map.tiling.of(get_rank())
    shards = [
        Shard(tile.to(placed[i][1]), metadata.shards_metadata[i])
        for i, tile in zip(own, tiles, strict=False)  # without shards there may be a stand-in
    ]
    tensor._sharding_spec, tensor._metadata = spec, metadata
    tensor._shard_map, tensor._local_shards = shard_map, shards
    if tiles and not shards:
        keep_stand_in(tensor, tiles[0])


def _new_tiles(tensor: ShardedTensorBase, target: Tiling, through_autograd: bool) -> list[Tensor]:
    if through_autograd:
        return list(_MoveTiles.apply(tensor, target, *graph_tiles(tensor)))  # type: ignore[no-untyped-call]
    gradient = tensor.metadata().tensor_properties.requires_grad
    return [tile.requires_grad_(gradient) for tile in move_tiles(tensor, target)]


class _MoveTiles(torch.autograd.Function):
    """Forward moves tiles to another tiling; backward moves the gradients back.

    A rank without tiles passes a stand-in, an empty tile, both ways.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: ShardedTensorBase, target: Tiling, *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = target, tensor.tiling, tensor._process_group
        return _or_stand_in(move_tiles(tensor, target), tiles[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, target, group = ctx.back
        held = gradients if source.of(get_rank()) else ()
        moved = _transfer(source, target, group, held, gradients[0])
        return None, None, *_or_stand_in(moved, gradients[0])


def _or_stand_in(tiles: list[Tensor], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(tiles) or (like.new_zeros((0,) * like.dim()),)


@torch.no_grad()
def move_tiles(tensor: ShardedTensorBase, target: Tiling) -> list[Tensor]:
    """This rank's tiles of ``target``, as new tensors on the same devices. Collective."""
    like = graph_tiles(tensor)[0]
    return _transfer(tensor.tiling, target, tensor._process_group, tensor.local_tiles(), like)


def _transfer(
    source: Tiling, target: Tiling, group: AnyGroup, tiles: Sequence[Tensor], like: Tensor
) -> list[Tensor]:
    if like.is_meta:
        sizes = [box.sizes for box in target.boxes_of(get_rank())]
        return [like.new_empty(size) for size in sizes]
    plan = transfer_plan(source, target, get_rank())
    return run_plan(plan, tiles, group, dtype=like.dtype, device=like.device)
