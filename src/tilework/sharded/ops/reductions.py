"""Reductions: of all elements to a plain tensor, along unsharded dims to a sharded tensor.

A reduction over all elements is a small all_gather of a result per tile (two for argmax, argmin and
for the gradient of an extremum). Then every rank combines the same numbers in the same order, and
all get the same bits. The result is replicated: its gradient is taken once. 16-bit floats are
accumulated in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_gather_into_tensor
from tilework.layout import Box
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.by_tile import by_tile, elementwise
from tilework.sharded.ops.tiles import (
    dims_of,
    graph_tiles,
    member_of,
    options_of,
    sharded_argument,
    zeros_after,
)
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.rules import accumulation_dtype


def gather_from_tiles(tensor: ShardedTensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """The results of ``compute`` for each tile that has elements, stacked, on every rank.

    Collective: one all_gather, of as many results as the rank with the most tiles has. The gathered
    value is replicated: each rank takes its own tiles' part of the gradient.
    """
    group = member_of(tensor, "a reduction")
    results = [compute(tile) for tile in tensor.local_tiles() if tile.numel()]
    if results:
        local = torch.stack(results)
    else:
        local = compute(zeros_after(tensor, (1,) * tensor.dim())).unsqueeze(0)[:0]
    owners = [tile.owners[0] for tile in tensor.tiling.tiles if not tile.box.empty]
    gathered: Tensor = _GatherRows.apply(local, group, owners)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup, owners: list[int]) -> Tensor:
        counts = dict.fromkeys(group.global_ranks, 0)
        places = []
        for owner in owners:
            places.append((group.group_ranks[owner], counts[owner]))
            counts[owner] += 1
        most = max(counts.values())
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: len(local)] = local
        gathered = local.new_empty((group.size() * most, *local.shape[1:]))
        all_gather_into_tensor(gathered, padded, group)
        ctx.own = [i for i, (rank, _) in enumerate(places) if rank == group.rank()]
        return gathered[[rank * most + i for rank, i in places]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.own], None, None


#: From a tensor with elements, the dtype of the result and the operator's options.
Reduce = Callable[[ShardedTensor, torch.dtype, dict[str, Any]], Tensor]


def _folded(func: Callable[..., Tensor]) -> Reduce:
    """The reduction by a function that can be applied again to the results of tiles."""

    def reduce(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        kind = accumulation_dtype(dtype)
        return func(gather_from_tiles(tensor, lambda tile: func(tile.to(kind)))).to(dtype)

    return reduce


def _summed(name: str, mean: bool = False) -> Reduce:
    """The sum of tiles' sums by a method of this name; divided by the number of elements."""

    def reduce(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        kind = accumulation_dtype(dtype)
        total = gather_from_tiles(tensor, lambda tile: getattr(tile, name)(dtype=kind)).sum()
        return (total / tensor.numel() if mean else total).to(dtype)

    return reduce


def _var(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    """The variance, from squares around each tile's mean, and of these around the total mean."""
    kind, n = accumulation_dtype(dtype), tensor.numel()
    correction = options.get("correction")
    if correction is None:
        correction = int(options.get("unbiased", True))
    if tensor.is_complex():
        raise unsupported(torch.var, (tensor,), options, "take the variance of real and imag")

    def moments(tile: Tensor) -> Tensor:
        values = tile.to(kind)
        mean = values.mean()
        return torch.stack([values.new_tensor(tile.numel()), mean, (values - mean).square().sum()])

    counts, means, squares = gather_from_tiles(tensor, moments).unbind(1)
    apart = means - (counts * means).sum() / n
    total = squares.sum() + (counts * apart.square()).sum()
    return (total / max(n - correction, 0)).to(dtype)


def _std(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    var = _var(tensor, accumulation_dtype(dtype), options)
    # The root's slope at 0 is infinite; torch takes 0.
    return torch.where(var == 0, 0, torch.where(var == 0, 1, var).sqrt()).to(dtype)


def _norm(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    order = options.get("ord", options.get("p", 2))
    order = 2.0 if order in (None, "fro") else order
    if isinstance(order, str):
        raise unsupported(torch.norm, (tensor,), options, "only the norms of vectors")
    if math.isinf(order):
        absolute: Any = tensor.abs()
        return _extreme(absolute, "amax" if order > 0 else "amin").to(dtype)
    kind, norm = options.get("dtype") or accumulation_dtype(tensor.dtype), torch.linalg.vector_norm
    parts = gather_from_tiles(tensor, lambda tile: norm(tile, order, dtype=kind))
    return (parts.sum() if order == 0 else norm(parts, order)).to(dtype)


def _extreme(tensor: ShardedTensor, name: str) -> Tensor:
    """The greatest or least element; equal elements share the gradient equally."""
    fold: Callable[[Tensor], Tensor] = getattr(torch, name)
    with torch.no_grad():
        best = fold(gather_from_tiles(tensor, fold))
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return best
    with torch.no_grad():
        shares = gather_from_tiles(tensor, lambda tile: _equal(tile, best).sum()).sum()
    extreme: Tensor = _Extreme.apply(  # type: ignore[no-untyped-call]
        best, shares, *graph_tiles(tensor)
    )
    return extreme


def _equal(tile: Tensor, value: Tensor) -> Tensor:
    return tile.isnan() if value.isnan() else tile == value


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, best: Tensor, shares: Tensor, *tiles: Tensor) -> Tensor:
        ctx.save_for_backward(best, shares, *tiles)
        return best.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        best, shares, *tiles = ctx.saved_tensors
        share = gradient / shares
        return None, None, *(torch.where(_equal(tile, best), share, 0) for tile in tiles)


def _arg(tensor: ShardedTensor, name: str) -> Tensor:
    """The place of the extremum in row-major order; the first if there are several."""
    fold, find = getattr(torch, f"a{name}"), getattr(torch, f"arg{name}")
    with torch.no_grad():
        values = gather_from_tiles(tensor, fold)
        boxes = iter([box for box in tensor.tiling.boxes_of(_rank(tensor)) if not box.empty])
        places = gather_from_tiles(
            tensor, lambda tile: _place(find(tile), next(boxes, None), tensor.shape)
        )
        return places[_equal(values, fold(values))].min()


def _place(index: Tensor, box: Box | None, shape: torch.Size) -> Tensor:
    if box is None or not shape:
        return index
    within = torch.unravel_index(index, box.sizes)
    place = torch.zeros_like(index)
    for offset, position, extent in zip(box.offsets, within, shape, strict=True):
        place = place * extent + offset + position
    return place


def _element(tensor: ShardedTensor, place: int) -> Tensor:
    """The element at a place of a tensor of at most one dim; only this element gets a gradient."""
    if not tensor.dim():
        return gather_from_tiles(tensor, lambda tile: tile)[0]
    boxes = [tile.box for tile in tensor.tiling.tiles if not tile.box.empty]
    row = next(i for i, box in enumerate(boxes) if box.offsets[0] <= place < box.ends[0])
    own = iter([box for box in tensor.tiling.boxes_of(_rank(tensor)) if not box.empty])

    def element(tile: Tensor) -> Tensor:
        box = next(own, None)
        within = 0 if box is None else place - box.offsets[0]
        return tile[min(max(within, 0), len(tile) - 1)]  # any element of the other tiles

    return gather_from_tiles(tensor, element)[row]


def _rank(tensor: ShardedTensor) -> int:
    group = member_of(tensor, "argmax")
    return group.global_ranks[group.rank()]


def _extremes(name: str) -> Reduce:
    def reduce(tensor: ShardedTensor, dtype: torch.dtype, options: dict[str, Any]) -> Any:
        if "dim" not in options:
            return _extreme(tensor, f"a{name}")
        place = _arg(tensor, name)
        kind = getattr(torch.return_types, name)
        return kind((_element(tensor, int(place)), place))

    return reduce


_DIM = ("dim", "keepdim")
_SPREAD = ("dim", "unbiased", "keepdim")
#: The reduction over all elements (None: refused), and the arguments after the tensor.
_REDUCTIONS: dict[str, tuple[Reduce | None, tuple[str, ...]]] = {
    "sum": (_summed("sum"), _DIM),
    "nansum": (_summed("nansum"), _DIM),
    "mean": (_summed("sum", mean=True), _DIM),
    "nanmean": (None, _DIM),
    "prod": (_folded(torch.prod), _DIM),
    "any": (_folded(torch.any), _DIM),
    "all": (_folded(torch.all), _DIM),
    "count_nonzero": (
        lambda tensor, dtype, options: gather_from_tiles(tensor, torch.count_nonzero).sum(),
        ("dim",),
    ),
    "logsumexp": (_folded(lambda x: x.reshape(-1).logsumexp(0)), _DIM),
    "amax": (lambda tensor, dtype, options: _extreme(tensor, "amax"), _DIM),
    "amin": (lambda tensor, dtype, options: _extreme(tensor, "amin"), _DIM),
    "max": (_extremes("max"), _DIM),
    "min": (_extremes("min"), _DIM),
    "argmax": (lambda tensor, dtype, options: _arg(tensor, "max"), _DIM),
    "argmin": (lambda tensor, dtype, options: _arg(tensor, "min"), _DIM),
    "aminmax": (None, ()),
    "median": (None, _DIM),
    "nanmedian": (None, _DIM),
    "mode": (None, _DIM),
    "var": (_var, _SPREAD),
    "std": (_std, _SPREAD),
    "var_mean": (None, _SPREAD),
    "std_mean": (None, _SPREAD),
    "norm": (_norm, ("p", "dim", "keepdim", "out", "dtype")),
    "linalg_vector_norm": (_norm, ("ord", *_DIM)),
}


def _reduction(func: Callable[..., Any], reduce: Reduce | None, names: tuple[str, ...]) -> Handler:
    along = by_tile(func, "it reduces unsharded dims, given by numbers")

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        options = options_of(names, args, kwargs)
        if isinstance(options.get("dim"), bool):  # var(x, unbiased)
            options["unbiased"] = options.pop("dim")
        if isinstance(options.get("dim", options.get("other")), Tensor):  # max(x, other)
            return elementwise(func)(types, args, kwargs, process_group)
        if options.get("out") is not None:
            raise unsupported(func, args, kwargs, "without out")
        dims = dims_of(tensor, options.get("dim"))
        if dims is not None and len(dims) < tensor.dim():
            return along(types, args, kwargs, process_group)
        others = {k: v for k, v in kwargs.items() if k not in ("input", "self", "out")}
        if reduce is None:
            hint = "only along dims that are not sharded; full_tensor() makes it a plain one"
            raise unsupported(func, args, kwargs, hint)
        member_of(tensor, func.__name__)
        if tensor.numel() == 0 or tensor.is_meta:
            return func(zeros_after(tensor, tensor.shape), *args[1:], **others)
        # The plain operator on a meta tensor gives the dtype and shape, or the refusal.
        like = func(torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype), *args[1:], **others)
        if _first(like).numel() != 1:  # any and all take () for no dims
            return along(types, args, kwargs, process_group)
        result = reduce(tensor, _first(like).dtype, options)
        return _shaped(result, _first(like).shape)

    return handler


def _first(result: Any) -> Tensor:
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first


def _shaped(result: Any, shape: torch.Size) -> Any:
    if isinstance(result, Tensor):
        return result.reshape(shape)
    return type(result)([part.reshape(shape) for part in result])


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of a reduction."""
    how = _REDUCTIONS.get(name)
    return None if how is None else _reduction(func, *how)
