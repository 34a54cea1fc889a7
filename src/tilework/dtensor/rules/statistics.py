"""Statistics, norms and softmax: over a cut dim they take a few small reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.rules.extrema import extreme
from tilework.dtensor.rules.helpers import settled
from tilework.dtensor.rules.reduction_args import any_sharded, dims_of, reduced, reduction, wide
from tilework.dtensor.spec import Ints
from tilework.tiled.factors import Factor, broadcast_shape
from tilework.tiled.op_rules import Arg, Decomposition, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule

# torch has no types for these.
_vector_norm_of: Callable[..., Tensor] = torch.linalg.vector_norm
_matrix_norm_of: Callable[..., Tensor] = torch.linalg.matrix_norm

# -- spread ------------------------------------------------------------------------------------


def _spread(name: str) -> None:
    of_part: Callable[..., Any] = getattr(torch, name)

    @reduction(name)
    def answer(
        input: Arg,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> RuleResult:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dims = dims_of(input.ndim, dim)
        if dims is None or not (input.dtype.is_floating_point or input.dtype.is_complex):
            return None
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)

        def make(ranges: LocalRanges, factors: list[Factor]) -> Callable[[Tensor], Any]:
            left = [one for at, one in enumerate(factors) if at not in dims]
            if all(ranges.local_range(one)[1] for one in left):
                return lambda part: of_part(part, dims, correction=correction, keepdim=keepdim)

            def of_nothing(part: Tensor) -> Any:  # torch would warn of few degrees of freedom
                mean = part.sum(dims, keepdim)
                spread = mean.real if mean.is_complex() else mean
                return (spread, mean) if "mean" in name else spread

            return of_nothing

        def run(input: Tensor, *_: Any, **__: Any) -> Any:
            spread, mean = _var_mean(settled(input), dims, keepdim, correction)
            if name.startswith("std"):
                spread = _root(spread)
            spread = spread.to(input.dtype.to_real())
            return (spread, mean.to(input.dtype)) if "mean" in name else spread

        if any_sharded(input, dims):
            return Decomposition(run)
        results = 2 if "mean" in name else 1
        return reduced(input, dims, keepdim, None, results=results, run=make)


for _name in ("var", "std", "var_mean", "std_mean"):
    _spread(_name)


def _var_mean(input: Tensor, dims: Ints, keepdim: bool, correction: float) -> tuple[Tensor, Tensor]:
    input = input.to(wide(input.dtype))
    count = math.prod(input.shape[dim] for dim in dims)
    mean = input.mean(dims, keepdim=True)
    total = _square(input - mean).sum(dims, keepdim)
    return total / max(count - correction, 0), mean if keepdim else mean.sum(dims)


def _square(input: Tensor) -> Tensor:
    return (input * input.conj()).real if input.is_complex() else input.square()


def _root(input: Tensor) -> Tensor:
    """The square root; its gradient at zero is zero, not infinite."""
    input = settled(input)
    zero = input == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, input).sqrt())


# -- norms -------------------------------------------------------------------------------------


@reduction("linalg_vector_norm")
def _vector_norm(
    input: Arg, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None or not (input.dtype.is_floating_point or input.dtype.is_complex):
        return None
    if not any_sharded(input, dims):
        return reduced(input, dims, keepdim, None)

    def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
        values = settled(input)
        if dtype is not None:
            values = values.to(dtype)
        found = _norm(values.to(wide(values.dtype)), float(ord), dims, keepdim)
        return found.to((dtype or input.dtype).to_real())

    return Decomposition(run)


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
    if order < 1:  # there the slope at zero is infinite; torch takes zero
        powers = torch.where(zero, 1.0, values).pow(order)
        powers = torch.where(zero, 0.0 if order > 0 else math.inf, powers)
    else:
        powers = values.pow(order)
    total = settled(powers.sum(dims, keepdim))
    if order < 0:
        return total.pow(1 / order)
    none = total == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, total).pow(1 / order))


@reduction("linalg_matrix_norm")
def _matrix_norm(
    A: Arg,
    ord: Any = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> RuleResult:
    dims = dims_of(A.ndim, dim)
    if dims is None or len(dims) != 2:
        return None
    if not any_sharded(A, dims) or ord not in ("fro", 1, -1, math.inf, -math.inf):
        return reduced(A, dims, keepdim, None)

    def run(A: Tensor, *_: Any, **__: Any) -> Tensor:
        if ord == "fro":
            return _vector_norm_of(A, 2, dims, keepdim, dtype=dtype)
        summed, most = dims if abs(ord) == 1 else dims[::-1]
        values = (A if dtype is None else A.to(dtype)).abs().sum(summed, keepdim=True)
        found = values.amax(most, keepdim=True) if ord > 0 else values.amin(most, keepdim=True)
        return found if keepdim else found.sum(dims)

    return Decomposition(run)


@reduction("linalg_norm")
def _linalg_norm(
    A: Arg, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> RuleResult:
    dims = dims_of(A.ndim, dim)
    if dims is None:
        return None
    many = len(dims) if dim is not None else A.ndim if ord is not None else 1
    if many > 2 or (many == 2 and A.ndim < 2):
        return None

    def run(A: Tensor, *_: Any, **__: Any) -> Tensor:
        if many == 2 and ord is not None:
            return _matrix_norm_of(A, ord, dims, keepdim, dtype=dtype)
        order = 2 if ord is None else ord
        return _vector_norm_of(A, order, dims, keepdim, dtype=dtype)

    return Decomposition(run)


@rule("dist")
def _dist(input: Arg, other: Arg, p: float = 2) -> RuleResult:
    return Decomposition(lambda input, other, p=2: _vector_norm_of(input - other, p))


@rule("renorm")
def _renorm(input: Arg, p: float, dim: int, maxnorm: float) -> RuleResult:
    return Decomposition(_renormed)


def _renormed(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    input = settled(input)
    others = [one for one in range(input.ndim) if one != dim % input.ndim]
    norm = _vector_norm_of(input, p, others, keepdim=True)
    return input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


# -- softmax -----------------------------------------------------------------------------------


def _softmax(name: str) -> None:
    @rule(name)
    def answer(input: Arg, dim: Any = None, *more: Any, dtype: Any = None, **_: Any) -> RuleResult:
        kind = next((one for one in more if isinstance(one, torch.dtype)), dtype)
        along = (0 if input.ndim in (0, 1, 3) else 1) if dim is None else dim
        dims = dims_of(input.ndim, along)
        if dims is None:
            return None
        if not any_sharded(input, dims) or not all(input.shape[one] for one in dims):
            factors = [
                None if at in dims else Factor(size, f"d{at}")
                for at, size in enumerate(input.shape)
            ]
            return local_call({input: factors}, [factors], shapes=[input.shape])
        return Decomposition(lambda input, *_, **__: _exponentials(name, input, dims, kind))


_softmax("softmax")
_softmax("log_softmax")


def _exponentials(name: str, input: Tensor, dims: Ints, dtype: torch.dtype | None) -> Tensor:
    values = settled(input)
    kind = dtype or input.dtype
    values = values.to(wide(kind))
    values = values - extreme(values.detach(), "amax", dims, True)
    powers = values.exp()
    total = powers.sum(dims, keepdim=True)
    return (powers / total if name == "softmax" else values - total.log()).to(kind)


@reduction("logsumexp")
def _logsumexp(input: Arg, dim: Any, keepdim: bool = False) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    if not any_sharded(input, dims) or not all(input.shape[one] for one in dims):
        return reduced(input, dims, keepdim, None)

    def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
        values = settled(input)
        if not (values.is_floating_point() or values.is_complex()):
            values = values.to(torch.get_default_dtype())
        kind = values.dtype
        values = values.to(wide(kind))
        most = settled(extreme(values.detach(), "amax", dims, True))
        most = torch.where(most.isinf(), 0.0, most)
        found = (values - most).exp().sum(dims, keepdim=True).log() + most
        return (found if keepdim else found.sum(dims)).to(kind)

    return None if input.dtype.is_complex else Decomposition(run)


# -- likeness ----------------------------------------------------------------------------------


@rule("cosine_similarity")
def _cosine_similarity(x1: Arg, x2: Arg, dim: int = 1, eps: float = 1e-8) -> RuleResult:
    return Decomposition(_cosine)


def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    kind = torch.promote_types(x1.dtype, x2.dtype)
    shape = broadcast_shape([x1.shape, x2.shape])
    x1, x2 = (x if x.shape == shape else x.expand(shape) for x in (x1.to(kind), x2.to(kind)))
    norms = [_vector_norm_of(x, 2, dim, keepdim=True) for x in (x1, x2)]
    # What is below eps is constant, but has a gradient as if it were not, as in torch.
    a, b = (
        x / torch.where(norm < eps, norm - norm.detach() + eps, norm)
        for x, norm in zip((x1, x2), norms, strict=True)
    )
    return (a * b).sum(dim)


@rule("pairwise_distance")
def _pairwise_distance(
    x1: Arg, x2: Arg, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> RuleResult:
    return Decomposition(_distance)


def _distance(
    x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return _vector_norm_of(x1 - x2 + eps, p, -1, keepdim)
