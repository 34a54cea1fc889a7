"""Concatenation along a sharded dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tilework.dtensor.propagation.op_sharding import DTensorArg, PlacedCall
from tilework.dtensor.rules.slicing import resizable, resize_to_range, resized
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.tiled import RuleResult, dtensor_rule
from tilework.tiled.rules import cat_dim, cat_shape, cat_shards


@dtensor_rule("cat")
def _cat(tensors: Sequence[DTensorArg], dim: int = 0, **_: Any) -> RuleResult:
    along = cat_dim(tensors, dim)
    if along is None or not any(arg.is_sharded(along) for arg in tensors):
        return None
    return _cat_sharded(tensors, along)


def _cat_sharded(tensors: Sequence[DTensorArg], dim: int) -> RuleResult:
    """The call of a concatenation along a sharded dim, in the first sharded layout."""
    shape = cat_shape(tensors, dim)
    target = _resharded_like(tensors, shape, dim)
    ends = [*itertools.accumulate(arg.shape[dim] for arg in tensors)]
    starts = [0, *ends[:-1]]
    while True:
        ways = [
            resizable(target, {dim: resize_to_range(start, end, 1)})
            for start, end in zip(starts, ends, strict=True)
        ]
        narrower = min((way[0] for way in ways), key=lambda spec: len(spec.axes_of(dim)))
        if narrower == target:
            break
        target = narrower  # the dim is sharded by one axis less
    dims = {i: i for i in range(len(shape))}
    inputs = [
        resized(target, arg.shape, dims, sizes)
        for arg, (_, sizes) in zip(tensors, ways, strict=True)
    ]
    return PlacedCall(inputs, [target], lambda *local_tensors: cat_shards(local_tensors, dim))


def _resharded_like(tensors: Sequence[DTensorArg], shape: Sequence[int], dim: int) -> DTensorSpec:
    """The layout of the first tensor that is sharded along ``dim``, for a tensor of ``shape``."""
    spec = next(arg.spec for arg in tensors if arg.is_sharded(dim))
    placements: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            placement = Shard(dim)
        elif isinstance(placement, Partial) and any(
            other.spec.placements[axis] != placement for other in tensors
        ):
            placement = Replicate()
        placements.append(placement)
    return spec_of(spec.mesh, placements, shape, spec.order)
