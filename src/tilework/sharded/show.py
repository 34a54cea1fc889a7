"""A sharded tensor on a terminal: a picture in colours, and a table of each rank's shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.formatting import Overview, overview, overview_page
from tilework.sharded.metadata import TensorProperties
from tilework.sharded.specs import ShardingSpec


def show(
    tensor: Tensor | ShardingSpec,
    *,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Print who holds which shards: a picture in colours, and a table of each rank's shards.

    Local: the metadata is enough, and one rank may call it alone. The picture shows the shards in
    proportion, but none too small to be seen. Without colours (in a pipe, or with NO_COLOR set) the
    labels say the same. Of hundreds of shards only some are drawn.

    Args:
        tensor: A sharded tensor; or a spec, to see how it would shard a tensor.
        size: The tensor's shape; only with a spec.
        dtype: The tensor's dtype, only with a spec; torch's default dtype if None.

    Raises:
        TypeError: It is neither a sharded tensor nor a spec.
        ValueError: The spec does not fit the size, or a spec is given without a size.

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, show
        >>> show(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), size=(3,))
        float32[3] in 2 chunks along dim 0 on ranks 0-1
        ...
    """
    overview_page(_overview(tensor, size, dtype)).print()


def _overview(
    tensor: Tensor | ShardingSpec, size: Sequence[int] | None, dtype: torch.dtype | None
) -> Overview:
    if isinstance(tensor, ShardingSpec):
        if size is None:
            raise ValueError("show() needs a size with a sharding spec: say show(spec, size=(...))")
        properties = TensorProperties(dtype or torch.get_default_dtype())
        return overview(tensor.build_metadata(tuple(size), properties), tensor)
    if not isinstance(tensor, ShardedTensorBase):
        raise TypeError(
            f"expected a sharded tensor or a sharding spec, got {type(tensor).__name__}; a plain "
            f"tensor is not on several ranks"
        )
    if size is not None or dtype is not None:
        raise ValueError(
            "show() takes size and dtype only with a sharding spec, got them with a tensor: call "
            "show(tensor), or show(spec, size=..., dtype=...)"
        )
    return tensor._overview()
