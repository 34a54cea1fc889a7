"""The values of a tensor, sharded as another tensor."""

from __future__ import annotations

from torch import Tensor

from tilework.comm.operations.internal import run_plan
from tilework.comm.world import NonMember, get_process_group_ranks, get_rank
from tilework.layout.internal import transfer_plan
from tilework.sharded.tensor import ShardedTensor


def reshard_like(source: Tensor, like: ShardedTensor) -> ShardedTensor:
    """The values of ``source``, sharded and placed as ``like``, without gradients.

    A plain ``source`` is replicated: each rank takes a slice, and nothing is communicated. A
    sharded ``source`` is moved over the group of ``like``: collective over the group. Tiles that
    need not move are not copied.

    Raises:
        ValueError: The sizes differ, or a rank outside the group of ``like`` holds a shard.
    """
    if source.shape != like.shape:
        raise ValueError(
            f"cannot copy the values of a tensor of size {tuple(source.shape)} to a tensor of size "
            f"{tuple(like.shape)}: the sizes must be equal"
        )
    tiles = [tile.detach() for tile in _tiles(source, like)]
    placed = zip(tiles, like.local_tiles(), strict=True)
    return like.like(
        [tile.to(own.device) for tile, own in placed], dtype=source.dtype, requires_grad=False
    )


def _tiles(source: Tensor, like: ShardedTensor) -> list[Tensor]:
    if not isinstance(source, ShardedTensor):
        return [source[shard.metadata.box.slices] for shard in like.local_shards()]
    if source.tiling == like.tiling:
        return source.local_tiles()
    group = like.process_group
    if isinstance(group, NonMember):
        return []
    members = get_process_group_ranks(group)
    outside = [rank for rank in source.tiling.ranks if rank not in members]
    if outside:
        raise ValueError(
            f"ranks {outside} hold shards of the tensor, but are not in the group of ranks "
            f"{members} that is to get the values: reshard the tensor onto ranks {members} first"
        )
    plan = transfer_plan(source.tiling, like.tiling, get_rank())
    return run_plan(plan, source.local_tiles(), group, dtype=source.dtype)


def describe_value(value: object) -> str:
    """The type, dtype, size and layout of a value, for ranks to compare before they move it."""
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = f"{value.dtype} of size {list(value.shape)}"
    if not isinstance(value, ShardedTensor):
        return f"a plain tensor, {kind}"
    return f"a sharded tensor, {kind} by {value.sharding_spec()}"
