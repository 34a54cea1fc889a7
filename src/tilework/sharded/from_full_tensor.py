"""Sharded tensors of values that every rank has."""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.comm.world import AnyGroup
from tilework.sharded.specs import ShardingSpec
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import TiledTensor


def from_full_tensor(
    tensor: Tensor, sharding_spec: ShardingSpec, process_group: AnyGroup = None
) -> ShardedTensor:
    """A sharded tensor with values that every rank has already; each rank copies the local shards.

    Local; nothing is communicated. The caller ensures that ``tensor`` is the same on all ranks
    (:func:`shard_tensor` sends one rank's tensor to the others instead). The result shares no
    memory with ``tensor``. It requires a gradient if ``tensor`` does, and is a leaf: no gradient
    flows back into ``tensor``. The opposite of :meth:`ShardedTensor.full_tensor`.

    Args:
        tensor: The full tensor. A rank without shards only needs the size and dtype: a meta tensor
            is enough.
        sharding_spec: Any spec that covers the tensor.
        process_group: The group; the default group if None. Ranks outside it may call this, too.

    Raises:
        TypeError: ``tensor`` is not a plain tensor.
        ValueError: The spec does not fit the tensor or the group.

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, from_full_tensor
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     return from_full_tensor(torch.arange(3), spec).local_tensor().tolist()
        >>> run_ranks(2, program)
        [[0, 1], [2]]
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, TiledTensor):
        raise TypeError(
            f"from_full_tensor takes a plain tensor, got {type(tensor).__name__}"
            + (": use its reshard(spec)" if isinstance(tensor, TiledTensor) else "")
        )
    sharded = ShardedTensor(
        sharding_spec,
        tensor.shape,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        process_group=process_group,
    )
    with torch.no_grad():
        for shard in sharded.local_shards():
            shard.tensor.copy_(tensor[shard.metadata.box.slices])
    return sharded
