"""Reductions: ranks reduce their shards, and the results are combined; norms and softmax.

The dims of statistics, and of maxima and minima with indices or a gradient, are unshardable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.layout.internal import Ints
from tilework.tiled.factors import Factor, broadcast_shape
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    RuleResult,
    composed,
    local_call,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.dim_ops import factors_but
from tilework.tiled.rules.elementwise import pointwise
from tilework.tiled.rules.reduction_args import any_sharded, dims_of, reduce_dims, sums_partial


def _register_reduction(name: str, reduce_op: str, sums: bool = False) -> None:
    """Register a reduction; with ``sums``, partial sums may be reduced as they are."""

    @rule(name)
    def answer(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
        linear = sums and sums_partial(input, dtype)
        return reduce_dims(input, dims_of(input.ndim, dim), keepdim, reduce_op, linear=linear)


_register_reduction("sum", "sum", sums=True)
_register_reduction("nansum", "sum")
_register_reduction("count_nonzero", "sum")
_register_reduction("prod", "product")


@rule("mean")
def _mean(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    count = math.prod(input.shape[at] for at in dims)

    def make(ranges: LocalRanges, factors: list[Factor]) -> Callable[[Tensor], Tensor]:
        local_count = math.prod(ranges.local_size((factors[at],)) for at in dims)
        if local_count == count:
            return lambda x: torch.mean(x, dims, keepdim, dtype=dtype)
        if local_count and (dtype or input.dtype).itemsize < 4:
            # A sum in 16 bits may overflow where the mean does not.
            return lambda x: torch.mean(x, dims, keepdim, dtype=dtype) * (local_count / count)
        return lambda x: torch.sum(x, dims, keepdim, dtype=dtype) / count

    if not (dtype or input.dtype).is_floating_point and not (dtype or input.dtype).is_complex:
        return None  # torch raises where it is run
    return reduce_dims(input, dims, keepdim, "sum", linear=sums_partial(input, dtype), run=make)


def _register_bools(names: str, reduce_op: str) -> None:
    @rule(*names.split())
    def answer(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
        # () means no dims, unlike in other reductions.
        dims = () if dim == () or dim == [] else dims_of(input.ndim, dim)
        return reduce_dims(input, dims, keepdim, reduce_op)


_register_bools("all _is_all_true", "min")
_register_bools("any _is_any_true", "max")


@rule("trace")
def _trace(input: Arg) -> RuleResult:
    if input.ndim != 2 or input.dtype is torch.bool:  # torch refuses the latter
        return None
    rows, columns = Factor(input.shape[0], "row"), Factor(input.shape[1], "column")

    def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
        offset = ranges.local_range(rows)[0] - ranges.local_range(columns)[0]
        wide = (
            torch.int64 if not (input.dtype.is_floating_point or input.dtype.is_complex) else None
        )
        return lambda x: x.diagonal(offset).sum(dtype=wide)

    sums = [[input]] if sums_partial(input, None) else []
    return local_call({input: [rows, columns]}, [[]], linear=sums, run=make)


@rule("histc")
def _histc(input: Arg, bins: int = 100, min: float = 0, max: float = 0) -> RuleResult:
    if min == max:
        return None  # the range comes from the elements
    factors = [Factor(size, f"d{dim}") for dim, size in enumerate(input.shape)]
    return local_call({input: factors}, [[None]])


def extreme_dims(input: Arg, dim: Any) -> Ints | None:
    """The dims to reduce; None if a dim is empty or ``dim`` is invalid, for which torch raises."""
    dims = dims_of(input.ndim, dim)
    return None if dims is None or not all(input.shape[dim] for dim in dims) else dims


def _register(name: str) -> None:
    @rule(f"a{name}")
    def amax(input: Arg, dim: Any = (), keepdim: bool = False) -> RuleResult:
        return reduce_dims(input, extreme_dims(input, dim), keepdim, None, extremum=name)

    @rule(name)
    def max(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> RuleResult:
        if isinstance(dim, Arg) or isinstance(other, Arg):
            given = [arg for arg in (input, dim, other) if isinstance(arg, Arg)]
            return pointwise(given, extremum=name)
        dims = extreme_dims(input, dim)
        if dim is None:
            return reduce_dims(input, dims, keepdim, None, extremum=name)
        return reduce_dims(input, dims, keepdim, None, results=2)


_register("max")
_register("min")


def _register_places(names: str, results: int) -> None:
    @rule(*names.split())
    def answer(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
        return reduce_dims(input, extreme_dims(input, dim), keepdim, None, results=results)


_register_places("argmax argmin", 1)
_register_places("aminmax", 2)

# torch has no type annotations for these.
_vector_norm_of: Callable[..., Tensor] = torch.linalg.vector_norm
_matrix_norm_of: Callable[..., Tensor] = torch.linalg.matrix_norm

# -- variance ----------------------------------------------------------------------------------


#: Answers a call on a tensor: the operator, the dims, ``keepdim`` and the correction.
SpreadAnswer = Callable[[str, Arg, Ints, bool, float], RuleResult]


def register_spreads(register: Callable[[str], Any], answer: SpreadAnswer) -> None:
    """Register a rule for variances and standard deviations, unless torch refuses the call."""
    for name in ("var", "std", "var_mean", "std_mean"):
        register(name)(_spread_rule(name, answer))


def _spread_rule(name: str, answer: SpreadAnswer) -> Callable[..., RuleResult]:
    def spread_rule(
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
        return answer(name, input, dims, keepdim, correction)

    return spread_rule


def _spread(name: str, input: Arg, dims: Ints, keepdim: bool, correction: float) -> RuleResult:
    of_shard: Callable[..., Any] = getattr(torch, name)

    def make(ranges: LocalRanges, factors: list[Factor]) -> Callable[[Tensor], Any]:
        left = [factor for at, factor in enumerate(factors) if at not in dims]
        if all(ranges.local_size((factor,)) for factor in left):
            return lambda x: of_shard(x, dims, correction=correction, keepdim=keepdim)

        def of_empty(x: Tensor) -> Any:  # torch would warn about the degrees of freedom
            squares = (x * x.conj()).real if x.is_complex() else x.square()
            spread = squares.sum(dims, keepdim)  # saves x, as torch does
            return (spread, x.sum(dims, keepdim)) if "mean" in name else spread

        return of_empty

    results = 2 if "mean" in name else 1
    return reduce_dims(input, dims, keepdim, None, results=results, run=make)


register_spreads(rule, _spread)

# -- norms -------------------------------------------------------------------------------------


@rule("linalg_vector_norm")
def _vector_norm(
    input: Arg, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> RuleResult:
    is_real = input.dtype.is_floating_point or input.dtype.is_complex
    return reduce_dims(input, dims_of(input.ndim, dim), keepdim, None) if is_real else None


@rule("linalg_matrix_norm")
def _matrix_norm(
    A: Arg, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> RuleResult:
    dims = dims_of(A.ndim, dim)
    return reduce_dims(A, dims, keepdim, None) if dims and len(dims) == 2 else None


@rule("linalg_norm")
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


rule("dist")(composed(lambda input, other, p=2: _vector_norm_of(input - other, p)))


# -- softmax -----------------------------------------------------------------------------------


def softmax_dims(input: Arg, dim: Any) -> Ints | None:
    """The dim of a softmax, as a tuple; None if there is no such dim."""
    if dim is None:
        dim = 0 if input.ndim in (0, 1, 3) else 1
    return dims_of(input.ndim, dim)


@rule("softmax", "log_softmax", "_safe_softmax")
def _softmax(input: Arg, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> RuleResult:
    dims = softmax_dims(input, dim)
    if dims is None:
        return None
    factors = factors_but(input.shape, dims)
    return local_call({input: factors}, [factors], shapes=[input.shape])


@rule("logsumexp")
def _logsumexp(input: Arg, dim: Any, keepdim: bool = False) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None or (input.dtype.is_complex and any_sharded(input, dims)):
        return None
    return reduce_dims(input, dims, keepdim, None)


# -- similarity --------------------------------------------------------------------------------


@rule("cosine_similarity")
@composed
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    kind = torch.promote_types(x1.dtype, x2.dtype)
    shape = broadcast_shape([x1.shape, x2.shape])
    x1, x2 = (x if x.shape == shape else x.expand(shape) for x in (x1.to(kind), x2.to(kind)))
    norms = [_vector_norm_of(x, 2, dim, keepdim=True) for x in (x1, x2)]
    # A norm below eps counts as eps, but keeps the norm's gradient, as in torch.
    a, b = (
        x / torch.where(norm < eps, norm - norm.detach() + eps, norm)
        for x, norm in zip((x1, x2), norms, strict=True)
    )
    return (a * b).sum(dim)


@rule("pairwise_distance")
@composed
def _pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return _vector_norm_of(x1 - x2 + eps, p, -1, keepdim)
