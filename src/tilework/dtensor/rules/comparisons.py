"""Questions about values that are answered by a bool or a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.tensor import DTensor
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult
from tilework.tiled.op_table import dtensor_handler, rule


@rule("equal")
def _equal(input: Arg, other: Arg) -> RuleResult:
    if input.shape != other.shape:
        return Decomposition(lambda input, other: False)
    return Decomposition(lambda input, other: bool((input == other).all()))


@rule("allclose")
def _allclose(input: Arg, other: Arg, *options: Any, **named: Any) -> RuleResult:
    return Decomposition(_all_close)


def _all_close(input: Tensor, other: Tensor, *options: Any, **named: Any) -> bool:
    return bool(torch.isclose(input, other, *options, **named).all())


@dtensor_handler(
    *("item", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
)
def _of_one_element(func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    if tensor.numel() != 1:  # torch says what is wrong with that
        return func(torch.zeros(()).expand(tensor.shape))
    with torch.no_grad():
        return func(DTensor.full_tensor(tensor))
