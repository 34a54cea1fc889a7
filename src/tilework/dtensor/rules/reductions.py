"""Reductions that are composed of other operators: means without NaNs, counts of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.tiled import Arg, Decomposition, Factor, RuleResult, dtensor_rule, local_call
from tilework.tiled.rules import keep_inputs_in_graph


@dtensor_rule("nanmean")
def _nanmean(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    is_refused = not (input.dtype.is_floating_point or input.dtype.is_complex)
    return None if is_refused else Decomposition(_mean_of_numbers)


def _mean_of_numbers(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    input = reduce_partial(input)
    count = (~input.detach().isnan()).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count


# -- counts of values --------------------------------------------------------------------------


@dtensor_rule("histc")
def _histc(input: Arg, bins: int = 100, min: float = 0, max: float = 0) -> RuleResult:
    return Decomposition(_histc_of_range) if min == max else None


def _histc_of_range(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    input = reduce_partial(input)
    if min == max and input.numel():
        min, max = input.min().item(), input.max().item()
    if min == max:
        min, max = min - 1, max + 1
    return torch.histc(input, bins, min, max)


@dtensor_rule("bincount")
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


@internal_operator(_counts_rule)
def _counts(input: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    counts = torch.bincount(input, weights, size)
    if weights is None:
        return counts
    # The counts of an empty shard do not have the dtype of the weights.
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return keep_inputs_in_graph(counts.to(dtype), weights)
