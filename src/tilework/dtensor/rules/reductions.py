"""Sums and what is like them: ranks reduce their parts, and the results are combined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.rules.helpers import operator, settled, tied
from tilework.dtensor.rules.reduction_args import dims_of, reduced, reduction
from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import Arg, Decomposition, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule


@reduction("sum")
def _sum(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, keepdim, "sum", linear=True)


@reduction("nansum")
def _nansum(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, keepdim, "sum")


@reduction("mean")
def _mean(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    count = math.prod(input.shape[one] for one in dims)

    def make(ranges: LocalRanges, factors: list[Factor]) -> Callable[[Tensor], Tensor]:
        here = math.prod(ranges.local_range(factors[one])[1] for one in dims)
        if here == count:
            return lambda part: torch.mean(part, dims, keepdim, dtype=dtype)
        if here and (dtype or input.dtype).itemsize < 4:
            # A sum of 16 bits may be too large where its mean is not.
            return lambda part: torch.mean(part, dims, keepdim, dtype=dtype) * (here / count)
        return lambda part: torch.sum(part, dims, keepdim, dtype=dtype) / count

    if not (dtype or input.dtype).is_floating_point and not (dtype or input.dtype).is_complex:
        return None  # torch says what is wrong with that
    return reduced(input, dims, keepdim, "sum", linear=True, run=make)


@reduction("nanmean")
def _nanmean(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    return Decomposition(_mean_of_numbers)


def _mean_of_numbers(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    input = settled(input)
    count = (~input.detach().isnan()).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count


@reduction("prod")
def _prod(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, keepdim, "product")


@reduction("all")
def _all(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, keepdim, "min")


@reduction("any")
def _any(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, keepdim, "max")


@reduction("count_nonzero")
def _count_nonzero(input: Arg, dim: Any = None) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    return None if dims is None else reduced(input, dims, False, "sum")


@rule("trace")
def _trace(input: Arg) -> RuleResult:
    if input.ndim != 2:
        return None
    rows, columns = Factor(input.shape[0], "row"), Factor(input.shape[1], "column")

    def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
        offset = ranges.local_range(rows)[0] - ranges.local_range(columns)[0]
        wide = (
            torch.int64 if not (input.dtype.is_floating_point or input.dtype.is_complex) else None
        )
        return lambda part: part.diagonal(offset).sum(dtype=wide)

    return local_call({input: [rows, columns]}, [[]], linear=[[input]], run=make)


# -- counts of values --------------------------------------------------------------------------


@rule("histc")
def _histc(input: Arg, bins: int = 100, min: float = 0, max: float = 0) -> RuleResult:
    if min == max:
        return Decomposition(_histc_of_range)
    factors = [Factor(size, f"d{dim}") for dim, size in enumerate(input.shape)]
    return local_call({input: factors}, [[None]])


def _histc_of_range(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    input = settled(input)
    if min == max and input.numel():
        min, max = input.min().item(), input.max().item()
    if min == max:
        min, max = min - 1, max + 1
    return torch.histc(input, bins, min, max)


@rule("bincount")
def _bincount(input: Arg, weights: Arg | None = None, minlength: int = 0) -> RuleResult:
    return Decomposition(_bincount_of_size)


def _bincount_of_size(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    least, most = input.aminmax() if input.numel() else (None, None)
    if least is not None and least.item() < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(minlength, 0 if most is None else int(most.item()) + 1)
    if weights is None or least is None:
        return _counts(input, size)
    return _counts(input, size, weights)


def _counts_rule(input: Arg, size: int, weights: Arg | None = None) -> RuleResult:
    item = Factor(input.shape[0], "item")
    inputs = {input: [item]} if weights is None else {input: [item], weights: [item]}
    linear = [] if weights is None else [[weights]]
    return local_call(inputs, [[None]], linear=linear, shapes=[(size,)])


@operator(_counts_rule)
def _counts(input: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    found = torch.bincount(input, weights, size)
    if weights is None:
        return found
    # A part without elements has no weights to take the dtype from.
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return tied(found.to(dtype), weights)
