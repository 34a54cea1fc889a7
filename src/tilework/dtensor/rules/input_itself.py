"""Operators that return the tensor itself if there is nothing to do."""

from __future__ import annotations

from typing import Any

import torch

from tilework.tiled import Arg, Decomposition, RuleResult, dtensor_rule, unchanged
from tilework.tiled.rules import pointwise, sizes_of


@dtensor_rule("sum_to_size")
def _sum_to_size(input: Arg, *size: Any, **named: Any) -> RuleResult:
    sizes = sizes_of(size or tuple(named.values()))
    return Decomposition(unchanged) if sizes and sizes == input.shape else None  # () is a sum


@dtensor_rule("to_dense", may_be_input=True)
def _to_dense(input: Arg, dtype: torch.dtype | None = None, **_: Any) -> RuleResult:
    return pointwise([input], rearranges=dtype in (None, input.dtype))
