"""Reductions: ranks reduce their shards, and the results are combined.

Of maxima and minima, those with indices and with a gradient reduce dims that are unshardable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.layout.internal import Ints
from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import Arg, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.elementwise import pointwise
from tilework.tiled.rules.reduction_args import dims_of, reduce_dims, sums_partial


@rule("sum")
def _sum(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return (
        None
        if dims is None
        else reduce_dims(input, dims, keepdim, "sum", linear=sums_partial(input, dtype))
    )


@rule("nansum")
def _nansum(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, "sum")


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


@rule("prod")
def _prod(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, "product")


@rule("all")
def _all(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    return _of_bools(input, dim, keepdim, "min")


@rule("any")
def _any(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    return _of_bools(input, dim, keepdim, "max")


@rule("_is_all_true")
def _is_all_true(input: Arg) -> RuleResult:
    return _of_bools(input, None, False, "min")


@rule("_is_any_true")
def _is_any_true(input: Arg) -> RuleResult:
    return _of_bools(input, None, False, "max")


def _of_bools(input: Arg, dim: Any, keepdim: bool, reduce_op: str) -> RuleResult:
    """The call of ``all`` or ``any``, where () means no dims, unlike in other reductions."""
    dims = () if dim == () or dim == [] else dims_of(input.ndim, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, reduce_op)


@rule("count_nonzero")
def _count_nonzero(input: Arg, dim: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduce_dims(input, dims, False, "sum")


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
    """Register the rules of amax and max, or of amin and min."""

    @rule(f"a{name}")
    def amax(input: Arg, dim: Any = (), keepdim: bool = False) -> RuleResult:
        dims = extreme_dims(input, dim)
        return None if dims is None else reduce_dims(input, dims, keepdim, None, extremum=name)

    @rule(name)
    def max(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> RuleResult:
        if isinstance(dim, Arg) or isinstance(other, Arg):
            given = [arg for arg in (input, dim, other) if isinstance(arg, Arg)]
            return pointwise(given, extremum=name)
        dims = extreme_dims(input, dim)
        if dims is None:
            return None
        if dim is None:
            return reduce_dims(input, dims, keepdim, None, extremum=name)
        return reduce_dims(input, dims, keepdim, None, results=2)


_register("max")
_register("min")


@rule("argmax", "argmin")
def _argmax(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None)


@rule("aminmax")
def _aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None, results=2)
