"""Statistics, norms and softmax over sharded dims: composed of a few small reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.rules.extrema import extreme
from tilework.dtensor.rules.internal_ops import reduce_partial
from tilework.layout.internal import Ints
from tilework.tiled import Arg, Decomposition, RuleResult, dtensor_rule
from tilework.tiled.rules import (
    accumulation_dtype,
    any_sharded,
    dims_of,
    register_spreads,
    softmax_dims,
)

# torch has no types for these.
_vector_norm_of: Callable[..., Tensor] = torch.linalg.vector_norm

# -- variance ----------------------------------------------------------------------------------


def _spread(name: str, input: Arg, dims: Ints, keepdim: bool, correction: float) -> RuleResult:
    def run(input: Tensor, *_: Any, **__: Any) -> Any:
        spread, mean = _var_mean(reduce_partial(input), dims, keepdim, correction)
        if name.startswith("std"):
            spread = _root(spread)
        spread = spread.to(input.dtype.to_real())
        return (spread, mean.to(input.dtype)) if "mean" in name else spread

    return Decomposition(run) if any_sharded(input, dims) else None


register_spreads(dtensor_rule, _spread)


def _var_mean(input: Tensor, dims: Ints, keepdim: bool, correction: float) -> tuple[Tensor, Tensor]:
    input = input.to(accumulation_dtype(input.dtype))
    count = math.prod(input.shape[dim] for dim in dims)
    mean = input.mean(dims, keepdim=True)
    total = _square(input - mean).sum(dims, keepdim)
    return total / max(count - correction, 0), mean if keepdim else mean.sum(dims)


def _square(input: Tensor) -> Tensor:
    return (input * input.conj()).real if input.is_complex() else input.square()


def _root(input: Tensor) -> Tensor:
    """Square root with a gradient of 0 at 0, where torch's gradient is infinite."""
    input = reduce_partial(input)
    zero = input == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, input).sqrt())


# -- norms -------------------------------------------------------------------------------------


@dtensor_rule("linalg_vector_norm")
def _vector_norm(
    input: Arg, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None or not (input.dtype.is_floating_point or input.dtype.is_complex):
        return None

    def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
        values = reduce_partial(input)
        if dtype is not None:
            values = values.to(dtype)
        norm = _norm(values.to(accumulation_dtype(values.dtype)), float(ord), dims, keepdim)
        return norm.to((dtype or input.dtype).to_real())

    return Decomposition(run) if any_sharded(input, dims) else None


def _norm(input: Tensor, order: float, dims: Ints, keepdim: bool) -> Tensor:
    if order == 2:
        return _root(_square(input).sum(dims, keepdim))
    values = input.abs()
    if math.isinf(order):
        return values.amax(dims, keepdim) if order > 0 else values.amin(dims, keepdim)
    if order == 1:
        return values.sum(dims, keepdim)
    zero = values.detach() == 0
    if order == 0:
        return torch.where(zero, values * 0, 1.0).sum(dims, keepdim)
    if order < 1:  # the slope at zero is infinite, for which torch takes zero
        powers = torch.where(zero, 1.0, values).pow(order)
        powers = torch.where(zero, 0.0 if order > 0 else math.inf, powers)
    else:
        powers = values.pow(order)
    total = reduce_partial(powers.sum(dims, keepdim))
    if order < 0:
        return total.pow(1 / order)
    none = total == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, total).pow(1 / order))


@dtensor_rule("linalg_matrix_norm")
def _matrix_norm(
    A: Arg,
    ord: Any = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> RuleResult:
    dims = dims_of(A.ndim, dim)
    if dims is None or len(dims) != 2 or not any_sharded(A, dims):
        return None
    if ord not in ("fro", 1, -1, math.inf, -math.inf):
        return None
    if not (A.dtype.is_floating_point or A.dtype.is_complex):
        return None  # torch raises

    def run(A: Tensor, *_: Any, **__: Any) -> Tensor:
        if ord == "fro":
            return _vector_norm_of(A, 2, dims, keepdim, dtype=dtype)
        summed, most = dims if abs(ord) == 1 else dims[::-1]
        values = (A if dtype is None else A.to(dtype)).abs().sum(summed, keepdim=True)
        if ord > 0:  # the maximum of no norms is 0
            norm = values.amax(most, keepdim=True) if A.shape[most] else values.sum(most, True)
        else:
            norm = values.amin(most, keepdim=True)
        return norm if keepdim else norm.sum(dims)

    return Decomposition(run)


@dtensor_rule("renorm")
def _renorm(input: Arg, p: float, dim: int, maxnorm: float) -> RuleResult:
    if input.ndim < 2 or dims_of(input.ndim, dim) is None or not (p > 0 and maxnorm >= 0):
        return None  # torch raises where it is run
    return Decomposition(_renormed)


def _renormed(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    input = reduce_partial(input)
    others = [other for other in range(input.ndim) if other != dim % input.ndim]
    norm = _vector_norm_of(input, p, others, keepdim=True)
    return input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


# -- softmax -----------------------------------------------------------------------------------


def _softmax(name: str) -> None:
    @dtensor_rule(name)
    def softmax_rule(
        input: Arg, dim: Any = None, *args: Any, dtype: Any = None, **_: Any
    ) -> RuleResult:
        dims = softmax_dims(input, dim)
        if dims is None or not _has_sharded_elements(input, dims):
            return None
        kind = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
        if not (kind or input.dtype).is_floating_point:
            return None  # torch raises
        return Decomposition(lambda input, *_, **__: _exponentials(name, input, dims, kind))


_softmax("softmax")
_softmax("log_softmax")


def _has_sharded_elements(input: Arg, dims: Ints) -> bool:
    return any_sharded(input, dims) and all(input.shape[dim] for dim in dims)


def _exponentials(name: str, input: Tensor, dims: Ints, dtype: torch.dtype | None) -> Tensor:
    values = reduce_partial(input)
    kind = dtype or input.dtype
    values = values.to(accumulation_dtype(kind))
    values = values - extreme(values.detach(), "amax", dims, True)
    powers = values.exp()
    total = powers.sum(dims, keepdim=True)
    return (powers / total if name == "softmax" else values - total.log()).to(kind)


@dtensor_rule("logsumexp")
def _logsumexp(input: Arg, dim: Any, keepdim: bool = False) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None or not _has_sharded_elements(input, dims) or input.dtype.is_complex:
        return None

    def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
        values = reduce_partial(input)
        if not (values.is_floating_point() or values.is_complex()):
            values = values.to(torch.get_default_dtype())
        kind = values.dtype
        values = values.to(accumulation_dtype(kind))
        most = reduce_partial(extreme(values.detach(), "amax", dims, True))
        most = torch.where(most.isinf(), 0.0, most)
        result = (values - most).exp().sum(dims, keepdim=True).log() + most
        return (result if keepdim else result.sum(dims)).to(kind)

    return Decomposition(run)
