"""New sharded tensors: zeros, ones, full, rand, randn, arange; and of values that every rank has.

Those of given values take a spec and a size, and these properties as
:class:`~tilework.sharded.ShardedTensor` does: ``dtype``, ``layout``, ``requires_grad``,
``pin_memory``, ``memory_format``, ``process_group``, ``init_rrefs``. Every rank must call them with
the same arguments; nothing is communicated, except with ``init_rrefs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.world import AnyGroup
from tilework.sharded.metadata import Shard
from tilework.sharded.specs import ShardingSpec
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import TiledTensor

Size = int | Sequence[int]


def empty(sharding_spec: ShardingSpec, *size: Size, **properties: Any) -> ShardedTensor:
    """A sharded tensor of unset memory. Example: see :func:`zeros`."""
    return ShardedTensor(sharding_spec, *size, **properties)


def zeros(sharding_spec: ShardingSpec, *size: Size, **properties: Any) -> ShardedTensor:
    """A sharded tensor of zeros.

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, zeros
        >>> from tilework.testing import run_ranks
        >>> halves = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> run_ranks(2, lambda rank: zeros(halves, 3).local_tensor().tolist())
        [[0.0, 0.0], [0.0]]
    """
    return _filled(sharding_spec, size, properties, lambda shard: shard.tensor.zero_())


def ones(sharding_spec: ShardingSpec, *size: Size, **properties: Any) -> ShardedTensor:
    """A sharded tensor of ones. Example: see :func:`zeros`."""
    return _filled(sharding_spec, size, properties, lambda shard: shard.tensor.fill_(1))


def full(
    sharding_spec: ShardingSpec, size: Size, fill_value: float | bool, **properties: Any
) -> ShardedTensor:
    """A sharded tensor with one value everywhere; by default of the value's dtype.

    Example: ``full(spec, [3], 7)``; see :func:`zeros`.
    """
    if properties.get("dtype") is None:
        properties["dtype"] = torch.full((), fill_value).dtype
    return _filled(sharding_spec, (size,), properties, lambda s: s.tensor.fill_(fill_value))


def rand(sharding_spec: ShardingSpec, *size: Size, **properties: Any) -> ShardedTensor:
    """A sharded tensor of numbers from [0, 1), each shard from the generator of its rank.

    Ranks with the same seed get the same numbers in their shards. Example: see :func:`zeros`.
    """
    return _filled(sharding_spec, size, properties, lambda shard: shard.tensor.uniform_())


def randn(sharding_spec: ShardingSpec, *size: Size, **properties: Any) -> ShardedTensor:
    """A sharded tensor of standard normal numbers; see :func:`rand`. Example: see :func:`zeros`."""
    return _filled(sharding_spec, size, properties, lambda shard: shard.tensor.normal_())


def arange(
    sharding_spec: ShardingSpec,
    start: float,
    end: float | None = None,
    step: float = 1,
    **properties: Any,
) -> ShardedTensor:
    """A sharded tensor of one dim, with the values of torch.arange.

    Floats are the numbers nearest to ``start + i * step``; torch's values may be one rounding off.

    Example: see :func:`zeros`.
    """
    first, last = (0, start) if end is None else (start, end)
    # Only the shape and the dtype of the full range are needed here.
    full_range = torch.arange(first, last, step, dtype=properties.pop("dtype", None), device="meta")

    # Floats are rounded once, at the end; integers are never floats.
    number, exact = (float, torch.float64) if full_range.is_floating_point() else (int, torch.int64)

    def fill(shard: Shard) -> None:
        offset, n = shard.metadata.shard_offsets[0], shard.tensor.numel()
        steps = torch.arange(offset, offset + n, dtype=exact)
        shard.tensor.copy_(steps * number(step) + number(first))

    return _filled(
        sharding_spec, tuple(full_range.shape), {**properties, "dtype": full_range.dtype}, fill
    )


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Size, **properties: Any
) -> ShardedTensor:
    """See :meth:`ShardedTensor.init_from_local_shards`.

    Example: see docs/how-to/sharded-tensors.md.
    """
    return ShardedTensor.init_from_local_shards(local_shards, *global_size, **properties)


def _filled(
    spec: ShardingSpec,
    size: Sequence[Size],
    properties: dict[str, Any],
    fill: Callable[[Shard], Tensor | None],
) -> ShardedTensor:
    def fill_real(shard: Shard) -> None:
        if not shard.tensor.is_meta:
            fill(shard)

    return ShardedTensor(spec, *size, fill=fill_real, **properties)


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

    Example: see docs/how-to/sharded-tensors.md.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, TiledTensor):
        raise TypeError(
            f"from_full_tensor takes a plain tensor, got {type(tensor).__name__}"
            + (": use its reshard(spec)" if isinstance(tensor, TiledTensor) else "")
        )
    return ShardedTensor(
        sharding_spec,
        tensor.shape,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        process_group=process_group,
        fill=lambda shard: shard.tensor.copy_(tensor[shard.metadata.box.slices]),
    )
