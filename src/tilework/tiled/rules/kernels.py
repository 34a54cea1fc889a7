"""Operators below torch's functions: kernels with more results, or of backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Dim, Factor, factors_of
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.pattern_rules import pattern_rule
from tilework.tiled.rules.convolution import guard_empty_shards
from tilework.tiled.rules.dim_ops import factors_but
from tilework.tiled.rules.empty_shards import allow_empty_shards
from tilework.tiled.rules.reduction_args import dims_of

_torch: Any = torch

pattern_rule("native_dropout_backward(grad_output, mask, scale)", "d*, d* -> d*")


@rule("alias_copy")
def _alias_copy(input: Arg) -> RuleResult:
    return Decomposition(torch.clone)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: Arg, output: Arg, dim: int, dtype: Any) -> RuleResult:
    dims = dims_of(output.ndim, dim)
    if dims is None or grad.shape != output.shape:
        return None
    factors = factors_but(output.shape, dims)
    return local_call({grad: factors, output: factors}, [factors])


@rule("_safe_softmax")
def _safe_softmax(input: Arg, dim: int, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    factors = factors_but(input.shape, dims)
    return local_call({input: factors}, [factors])


@rule("native_layer_norm")
def _native_layer_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> RuleResult:
    count = len(normalized_shape)
    loops = [*factors_of(input.shape[: input.ndim - count]), *(None,) * count]
    each = {arg: [None] * arg.ndim for arg in (weight, bias) if isinstance(arg, Arg)}
    return local_call({input: loops, **each}, [loops] * 3)


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(input: Arg, grid: Arg, mode: int, padding: int, corners: bool) -> RuleResult:
    if input.ndim not in (4, 5) or grid.ndim != input.ndim or grid.shape[0] != input.shape[0]:
        return None
    n, c, *places = factors_of((*input.shape[:2], *grid.shape[1:-1]))
    inputs: dict[Arg, Sequence[Factor | Dim | None]] = {
        input: [n, c, *(None,) * (input.ndim - 2)],
        grid: [n, *places, None],
    }
    arguments = {"input": input, "grid": grid, "interpolation_mode": mode}
    arguments.update(padding_mode=padding, align_corners=corners)
    run = guard_empty_shards(getattr(_torch, f"grid_sampler_{input.ndim - 2}d"), arguments, inputs)
    return local_call(inputs, [[n, c, *places]], linear=[[input]], run=run)


def _register_resampling(name: str) -> None:
    operator = getattr(torch.ops.aten, name)

    @rule(name)
    def answer(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        if input.ndim != 4 or any(isinstance(arg, Arg) for arg in (*args, *kwargs.values())):
            return None
        loops = [*factors_of(input.shape[:2]), None, None]
        run = allow_empty_shards(lambda x: operator(x, *args, **kwargs))
        return local_call({input: loops}, [loops], linear=[[input]], run=run)


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_resampling(_name)


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
    if fweights is not None or aweights is not None or not _has_rows(input, correction):
        return None
    return Decomposition(partial(_covariance, correction))


def _has_rows(input: Arg, correction: int) -> bool:
    """True if torch neither refuses the rows nor warns about the degrees of freedom."""
    is_real = input.dtype.is_floating_point or input.dtype.is_complex
    return input.ndim in (1, 2) and is_real and input.shape[-1] > max(correction, 0)


def _covariance(correction: int, input: Tensor, **_: Any) -> Tensor:
    x = input.reshape(-1, input.shape[-1])
    x = x - x.mean(1, keepdim=True)
    spread = x @ x.mH / (input.shape[-1] - correction)
    return spread.reshape(()) if x.shape[0] == 1 else spread


@rule("corrcoef")
def _corrcoef(input: Arg) -> RuleResult:
    if not _has_rows(input, 1) or input.dtype.is_complex:
        return None

    def compute(input: Tensor) -> Tensor:
        spread = _covariance(1, input)
        if spread.dim() == 0:
            return spread / spread
        deviation = spread.diagonal().sqrt()
        return (spread / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clip(-1, 1)

    return Decomposition(compute)
