"""Concatenation of tensors with the same sharding, along an unsharded dim or a new dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.ask_rule import local_call
from tilework.sharded.ops.dim_ops import SHARDED_DIM
from tilework.sharded.ops.result_layout import ResultLayout, cached, layout_of_boxes, of_tiles
from tilework.sharded.ops.tiles import OTHER_LAYOUT, graph_tiles
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import NotLocal, Obstacle, propagate_boxes, shape_of


def _cats(func: Callable[..., Any], name: str) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        options = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        tensors: list[Any] = list(options["tensors"])
        if not all(isinstance(tensor, ShardedTensor) for tensor in tensors):
            raise unsupported(
                func, args, kwargs, "all must be sharded: shard_tensor shards a plain one"
            )
        if options.get("out") is not None or any(t.dim() != tensors[0].dim() for t in tensors):
            raise unsupported(func, args, kwargs, "all must have as many dims, and no out")
        dim = options.get("dim", options.get("axis", 0))
        layout = _layout(func, name, tensors, dim)
        if isinstance(layout, NotLocal):
            hint = OTHER_LAYOUT
            if layout.obstacle is Obstacle.UNSHARDABLE:
                hint = SHARDED_DIM.format(layout.dim)
            raise unsupported(func, args, kwargs, hint)
        results = [
            _joined(func, tensors[0], column, dim)
            for column in zip(*(graph_tiles(tensor) for tensor in tensors), strict=True)
        ]
        parts = iter(results)
        return of_tiles(tensors[0], layout, lambda *_: next(parts), stand_in=results[0])

    return handler


def _layout(
    func: Callable[..., Any], name: str, tensors: Sequence[ShardedTensor], dim: int
) -> ResultLayout | NotLocal:
    """The layout of the result; or the reason why there is none."""
    first, tilings = tensors[0], [tensor.tiling for tensor in tensors]

    def evaluate() -> ResultLayout | NotLocal:
        call = local_call(name, func, (tensors, dim), {})
        if call is None:
            return NotLocal(Obstacle.MISMATCHED, 0, None)
        op = propagate_boxes(call.map, tilings)
        if isinstance(op, NotLocal):
            return op
        size = shape_of(call.map.outputs[0])
        return layout_of_boxes(first, size, op.boxes())

    if any(tensor.process_group is not first.process_group for tensor in tensors):
        return NotLocal(Obstacle.MISMATCHED, 0, None)
    return cached(first, (name, dim, *tilings), evaluate)


def _joined(
    func: Callable[..., Any], first: ShardedTensor, column: Sequence[Tensor], dim: int
) -> Tensor:
    """The results for the tiles of all tensors; or for their stand-ins."""
    if first.local_tiles():
        result: Tensor = func(column, dim)
        return result
    return torch.cat([tile.reshape(-1) for tile in column])


TABLE: dict[Callable[..., Any], Handler] = {
    **{func: _cats(func, "cat") for func in (torch.cat, torch.concat, torch.concatenate)},
    torch.stack: _cats(torch.stack, "stack"),
}
