"""Tensors that are cut alike, put together along a dim that is not cut, or along a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilework.layout import Box
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.dim_ops import CUT, dims_of, first_cut
from tilework.sharded.ops.tiles import OTHER_LAYOUT, graph_tiles, recut
from tilework.sharded.ops.views import unsqueeze
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def _joins(func: Callable[..., Any], new_dim: bool) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        tensors = list(given["tensors"])
        if not all(isinstance(tensor, ShardedTensor) for tensor in tensors):
            raise unsupported(
                func, args, kwargs, "all must be sharded: shard_tensor cuts a plain one"
            )
        dim = given.get("dim", given.get("axis", 0))
        if given.get("out") is not None or any(t.dim() != tensors[0].dim() for t in tensors):
            raise unsupported(func, args, kwargs, "all must have as many dims, and no out")
        if new_dim:
            dim %= tensors[0].dim() + 1
            tensors = [unsqueeze(tensor, dim) for tensor in tensors]
        else:
            dim = (dims_of(tensors[0], dim) or (0,))[0]
        if any(first_cut(tensor, [dim]) is not None for tensor in tensors):
            raise unsupported(func, args, kwargs, CUT.format(dim))
        if any(_beside(t, dim) != _beside(tensors[0], dim) for t in tensors):
            raise unsupported(func, args, kwargs, OTHER_LAYOUT)
        return _joined(tensors, dim)

    return handler


def _beside(tensor: ShardedTensor, dim: int) -> Any:
    """Who holds what, but for the dim."""
    boxes = [shard.box for shard in tensor.metadata().shards_metadata]
    cuts = [_replaced(numbers, dim, 0) for b in boxes for numbers in (b.offsets, b.sizes)]
    return tensor.process_group, tensor.owners, cuts


def _joined(tensors: Sequence[ShardedTensor], dim: int) -> ShardedTensor:
    extent = sum(tensor.shape[dim] for tensor in tensors)
    columns = zip(*(graph_tiles(tensor) for tensor in tensors), strict=True)
    held = bool(tensors[0].local_tiles())
    results = [
        torch.cat(list(column), dim) if held else torch.cat([t.reshape(-1) for t in column])
        for column in columns
    ]
    parts = iter(results)
    return recut(
        tensors[0],
        _replaced(tensors[0].shape, dim, extent),
        lambda box: Box(box.offsets, _replaced(box.sizes, dim, extent)),
        lambda tile, box: next(parts),
        stand_in=results[0],
    )


def _replaced(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


TABLE: dict[Callable[..., Any], Handler] = {
    **{f: _joins(f, new_dim=False) for f in (torch.cat, torch.concat, torch.concatenate)},
    torch.stack: _joins(torch.stack, new_dim=True),
}
