"""Operators below torch's functions: kernels with more results, or of backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Factor, factors_of
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    RuleResult,
    composed,
    local_call,
    match_pattern,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.convolution import grid_sampled
from tilework.tiled.rules.dim_ops import factors_but
from tilework.tiled.rules.empty_shards import allow_empty_shards, with_row_for_empty
from tilework.tiled.rules.reduction_args import dims_of

_torch: Any = torch


@rule("native_dropout_backward", values_matter=False)
def _native_dropout_backward(grad_output: Any, mask: Any, scale: Any) -> RuleResult:
    return match_pattern("d*, d* -> d*", [grad_output, mask])


rule("alias_copy")(composed(lambda input: input.clone()))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: Arg, output: Arg, dim: int, dtype: Any) -> RuleResult:
    dims = dims_of(output.ndim, dim)
    if dims is None or grad.shape != output.shape:
        return None
    factors = factors_but(output.shape, dims)
    return local_call({grad: factors, output: factors}, [factors])


@rule("native_layer_norm")
def _native_layer_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> RuleResult:
    count = len(normalized_shape)
    loops = [*factors_of(input.shape[: input.ndim - count]), *(None,) * count]
    each = {arg: [None] * arg.ndim for arg in (weight, bias) if isinstance(arg, Arg)}
    return local_call({input: loops, **each}, [loops] * 3)


@rule("native_group_norm")
def _native_group_norm(input: Arg, weight: Any, bias: Any, N: int, *args: Any) -> RuleResult:
    if input.ndim < 2 or input.shape[0] != N:
        return None
    n = Factor(N, "n")
    loops = [n, *(None,) * (input.ndim - 1)]
    each = {arg: [None] for arg in (weight, bias) if isinstance(arg, Arg)}
    here = [arg is not None for arg in (weight, bias)]

    def normed(x: Tensor, *tensors: Tensor) -> Any:
        given = iter(tensors)
        both = [next(given) if there else None for there in here]
        return _torch.native_group_norm(x, *both, x.shape[0], *args)

    def make(ranges: LocalRanges) -> Callable[..., Any]:
        return partial(with_row_for_empty, normed) if ranges.has_empty_shards else normed

    return local_call({input: loops, **each}, [loops, [n, None], [n, None]], run=make)


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(input: Arg, grid: Arg, mode: int, padding: int, corners: bool) -> RuleResult:
    sampler = getattr(_torch, f"grid_sampler_{input.ndim - 2}d", None)
    arguments = {"input": input, "grid": grid, "interpolation_mode": mode}
    arguments.update(padding_mode=padding, align_corners=corners)
    return grid_sampled(sampler, input, grid, arguments) if sampler else None


def _register_resampling(name: str) -> None:
    operator = getattr(torch.ops.aten, name)

    @rule(name)
    def answer(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        if input.ndim != 4 or any(isinstance(arg, Arg) for arg in (*args, *kwargs.values())):
            return None
        loops = [*factors_of(input.shape[:2]), None, None]
        run = allow_empty_shards(lambda x: operator(x, *args, **kwargs))
        return local_call({input: loops}, [loops], linear=[[input]], run=run)


_register_resampling("_upsample_bilinear2d_aa")
_register_resampling("_upsample_bicubic2d_aa")


@rule("max_pool2d_with_indices_backward")
def _max_pool_backward(grad: Arg, input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
    indices = kwargs.get("indices", args[-1] if args else None)
    if not isinstance(indices, Arg) or input.ndim not in (3, 4) or grad.shape != indices.shape:
        return None
    loops = [*factors_of(input.shape[:-2]), None, None]
    return local_call(dict.fromkeys((grad, input, indices), loops), [loops], linear=[[grad]])


# -- statistics of rows ----------------------------------------------------------------------


@rule("cov")
def _cov(
    input: Arg, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> RuleResult:
    weights = fweights is not None or aweights is not None
    return Decomposition(_covariance) if not weights and _has_rows(input, correction) else None


def _has_rows(input: Arg, correction: int) -> bool:
    """True if torch neither refuses the rows nor warns about the degrees of freedom."""
    is_real = input.dtype.is_floating_point or input.dtype.is_complex
    return input.ndim in (1, 2) and is_real and input.shape[-1] > max(correction, 0)


def _covariance(input: Tensor, *, correction: int = 1, **_: Any) -> Tensor:
    x = input.reshape(-1, input.shape[-1])
    x = x - x.mean(1, keepdim=True)
    spread = x @ x.mH / (input.shape[-1] - correction)
    return spread.reshape(()) if x.shape[0] == 1 else spread


@rule("corrcoef")
def _corrcoef(input: Arg) -> RuleResult:
    if not _has_rows(input, 1) or input.dtype.is_complex:
        return None

    def compute(input: Tensor) -> Tensor:
        spread = _covariance(input)
        if spread.dim() == 0:
            return spread / spread
        deviation = spread.diagonal().sqrt()
        return (spread / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clip(-1, 1)

    return Decomposition(compute)


# -- by other operators ----------------------------------------------------------------------


@rule("geqrf")
def _geqrf(input: Arg) -> RuleResult:
    if input.ndim < 2:
        return None
    batch = factors_of(input.shape[:-2])
    shapes = [input.shape, (*input.shape[:-2], min(input.shape[-2:]))]
    run = allow_empty_shards(torch.geqrf)
    outs = [[*batch, None, None], [*batch, None]]
    return local_call({input: outs[0]}, outs, run=run, shapes=shapes)


@rule("linalg_tensorinv")
def _tensorinv(input: Arg, ind: int = 2) -> RuleResult:
    size = math.prod(input.shape[ind:])
    if not 0 < ind < input.ndim or math.prod(input.shape[:ind]) != size:
        return None  # torch refuses it
    shape = (*input.shape[ind:], *input.shape[:ind])
    return Decomposition(lambda input, *_, **__: input.reshape(size, size).inverse().reshape(shape))


@rule("linalg_tensorsolve")
def _tensorsolve(input: Arg, other: Arg, dims: Any = None) -> RuleResult:
    def compute(input: Tensor, other: Tensor, dims: Any = None) -> Tensor:
        if dims is not None:
            count = len(dims)
            input = input.movedim(tuple(dims), tuple(range(-count, 0)))
        square = input.reshape(size, size)
        found: Tensor = torch.linalg.solve(square, other.flatten())
        return found.reshape(input.shape[other.dim() :])

    size = math.prod(other.shape)
    fits = math.prod(input.shape) == size**2
    return Decomposition(compute, is_checked=True) if fits else None


@rule("_unsafe_masked_index")
@composed
def _masked_index(input: Tensor, mask: Tensor, indices: Any, fill: Any) -> Tensor:
    found: Tensor = input[_clamped(input, indices)]
    return found.masked_fill(~mask, fill)


@rule("_unsafe_masked_index_put_accumulate")
@composed
def _masked_index_put(input: Tensor, mask: Tensor, indices: Any, values: Tensor) -> Tensor:
    kept = values.masked_fill(~mask, 0)
    result: Tensor = torch.index_put(input, _clamped(input, indices), kept, accumulate=True)
    return result


def _clamped(input: Tensor, indices: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Indices within the tensor: masked ones may lie anywhere."""
    return tuple([
        slice(None) if index is None else index.clamp(-size, size - 1)
        for index, size in zip(indices, input.shape, strict=False)
    ])  # fmt: skip


@rule("nonzero_static")
def _nonzero_static(input: Arg, *, size: int, fill_value: int = -1) -> RuleResult:
    def compute(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
        places = input.nonzero()[:size]
        rest = places.new_full((size - places.shape[0], places.shape[1]), fill_value)
        return torch.cat([places, rest])

    return Decomposition(compute) if size >= 0 else None
