"""Tensors that are cut alike, put together along a dim that is not cut, or along a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.dim_ops import SHARDED_DIM, dims_of
from tilework.sharded.ops.result_layout import ResultLayout, cached, layout_of_boxes, of_tiles
from tilework.sharded.ops.tiles import OTHER_LAYOUT, graph_tiles
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.box_propagation import NotLocal, Obstacle, propagate_boxes, shape_of
from tilework.tiled.factors import DimFactors, Factor, FactorMap, dim_factors, factors_of


def _joins(func: Callable[..., Any], new_dim: bool) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        tensors: list[Any] = list(given["tensors"])
        if not all(isinstance(tensor, ShardedTensor) for tensor in tensors):
            raise unsupported(
                func, args, kwargs, "all must be sharded: shard_tensor cuts a plain one"
            )
        dim = given.get("dim", given.get("axis", 0))
        if given.get("out") is not None or any(t.dim() != tensors[0].dim() for t in tensors):
            raise unsupported(func, args, kwargs, "all must have as many dims, and no out")
        if new_dim:
            dim %= tensors[0].dim() + 1
            tensors = [tensor.unsqueeze(dim) for tensor in tensors]
        else:
            dim = (dims_of(tensors[0], dim) or (0,))[0]
        layout = _layout(tensors, dim)
        if isinstance(layout, NotLocal):
            hint = OTHER_LAYOUT
            if layout.obstacle is Obstacle.UNSHARDABLE:
                hint = SHARDED_DIM.format(dim)
            raise unsupported(func, args, kwargs, hint)
        return _joined(tensors, dim, layout)

    return handler


def _layout(tensors: Sequence[ShardedTensor], dim: int) -> ResultLayout | NotLocal:
    """How tensors lie that are put together along a dim; why they cannot be."""
    first, tilings = tensors[0], [tensor.tiling for tensor in tensors]

    def evaluate() -> ResultLayout | NotLocal:
        local = propagate_boxes(_map(tensors, dim), tilings)
        if isinstance(local, NotLocal):
            return local
        size = shape_of(local.map.outputs[0])
        return layout_of_boxes(first, size, local.boxes())

    if any(tensor.process_group is not first.process_group for tensor in tensors):
        return NotLocal(Obstacle.MISMATCHED, 0, None)
    return cached(first, ("cat", dim, *tilings), evaluate)


def _map(tensors: Sequence[ShardedTensor], dim: int) -> FactorMap:
    """All tensors run over the same factors, but for ``dim``, which each tile needs whole."""
    others = factors_of(tensors[0].shape)

    def dims(extent: int) -> DimFactors:
        return dim_factors([*others[:dim], Factor(extent, unshardable=True), *others[dim + 1 :]])

    extents = [tensor.shape[dim] for tensor in tensors]
    return FactorMap(tuple(map(dims, extents)), (dims(sum(extents)),))


def _joined(tensors: Sequence[ShardedTensor], dim: int, layout: ResultLayout) -> ShardedTensor:
    columns = zip(*(graph_tiles(tensor) for tensor in tensors), strict=True)
    held = bool(tensors[0].local_tiles())
    results = [
        torch.cat(list(column), dim) if held else torch.cat([t.reshape(-1) for t in column])
        for column in columns
    ]
    parts = iter(results)
    return of_tiles(tensors[0], layout, lambda *_: next(parts), stand_in=results[0])


TABLE: dict[Callable[..., Any], Handler] = {
    **{f: _joins(f, new_dim=False) for f in (torch.cat, torch.concat, torch.concatenate)},
    torch.stack: _joins(torch.stack, new_dim=True),
}
