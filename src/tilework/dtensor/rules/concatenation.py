"""Concatenation along a sharded dim; padding, by which the first and the last shard grow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor.propagation.op_sharding import DTensorArg, PlacedCall
from tilework.dtensor.rules.slicing import Resize, resizable, resize_to_range, resized, shard_number
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.tiled import Arg, Decomposition, Factor, RuleResult, dtensor_rule, local_call
from tilework.tiled.rules import cat_dim, cat_shape, cat_shards, guard_empty_shards, sizes_of


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


@dtensor_rule("pad")
def _pad(input: DTensorArg, pad: Any, mode: str = "constant", value: Any = None) -> RuleResult:
    widths = sizes_of((pad,))
    if len(widths) % 2 or len(widths) > 2 * input.ndim or isinstance(value, Arg):
        return None
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    by_dim = {input.ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}
    number = 0 if value is None else value
    if mode == "constant":
        cropped = {dim: -sum(min(width, 0) for width in pair) for dim, pair in by_dim.items()}
        if any(count > input.shape[dim] for dim, count in cropped.items()):
            return None  # torch refuses it
        if any(cropped.values()):
            return Decomposition(lambda input, *_, **__: _crop_and_pad(input, widths, number))
        return _constant_padding(input, by_dim, number)
    # Elements are repeated at the ends, so padded dims are unshardable.
    factors = [Factor(size, unshardable=dim in by_dim) for dim, size in enumerate(input.shape)]
    out = [
        Factor(factor.size + sum(by_dim[dim]), unshardable=True) if dim in by_dim else factor
        for dim, factor in enumerate(factors)
    ]

    inputs: dict[Arg, Any] = {input: factors}
    arguments = {"input": input, "pad": widths, "mode": mode}
    run = guard_empty_shards(F.pad, arguments, inputs)
    return local_call(inputs, [out], rearranges=True, run=run)


@dtensor_rule("constant_pad_nd")
def _constant_pad(input: DTensorArg, pad: Any, value: Any = 0) -> RuleResult:
    return _pad(input, pad, "constant", value)


def _constant_padding(
    input: DTensorArg, by_dim: dict[int, tuple[int, int]], value: Any
) -> RuleResult:
    """The rule of constant padding: only the outermost shards grow, nothing moves."""
    spec = input.spec
    if value != 0:
        spec = spec.dual
    resizes = {dim: _grow_ends(*pair) for dim, pair in by_dim.items() if spec.axes_of(dim)}
    source, sizes = resizable(spec, resizes)
    here: list[int] = []
    for dim in reversed(range(input.ndim)):
        before, after = by_dim.get(dim, (0, 0))
        place, count = shard_number(source, dim)
        here += [before if place == 0 else 0, after if place == count - 1 else 0]
    shape = [size + sum(by_dim.get(dim, (0, 0))) for dim, size in enumerate(input.shape)]
    out = resized(source, shape, {i: i for i in range(input.ndim)}, sizes)
    return PlacedCall([source], [out], lambda x: _pad_with_constant(x, here, value))


def _pad_with_constant(x: Tensor, widths: Sequence[int], value: Any) -> Tensor:
    """``constant_pad_nd`` that also takes a tensor without elements (torch does from 2.8 on)."""
    if x.numel():
        return torch.constant_pad_nd(x, list(widths), value)
    for dim, (before, after) in enumerate(zip(widths[-2::-2], widths[::-2], strict=True)):
        shape = list(x.shape)
        blocks = []
        for width in (before, after):
            shape[dim] = width
            blocks.append(x.new_full(shape, value))
        x = cat_shards([blocks[0], x, blocks[1]], dim)
    return x


def _grow_ends(before: int, after: int) -> Resize:
    def resize(shards: Sequence[tuple[int, int]]) -> list[int]:
        sizes = [size for _, size in shards]
        sizes[0] += before
        sizes[-1] += after
        return sizes

    return resize


def _crop_and_pad(input: Tensor, pad: Sequence[int], value: Any) -> Tensor:
    """Pad with a constant, with some negative widths: crop the tensor first, then pad the rest."""
    index: list[Any] = [slice(None)] * input.dim()
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = input.dim() - 1 - i
        stop = input.shape[dim] - max(-after, 0)
        index[dim] = slice(max(-before, 0), max(stop, max(-before, 0)))
    rest = [max(width, 0) for width in pad]
    return torch.constant_pad_nd(input[tuple(index)], rest, value)
