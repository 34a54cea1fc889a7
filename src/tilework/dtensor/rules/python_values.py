"""Operators whose result is a Python value: a bool, a number, or a name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.dispatch.results import full_value
from tilework.tiled import Arg, Decomposition, RuleResult, composed, dtensor_handler, dtensor_rule


@dtensor_rule("equal")
def _equal(input: Arg, other: Arg) -> RuleResult:
    if input.shape != other.shape:
        return Decomposition(lambda input, other: False)
    return Decomposition(lambda input, other: bool((input == other).all()))


@dtensor_rule("allclose")
@composed
def _allclose(input: Tensor, other: Tensor, *options: Any, **named: Any) -> bool:
    return bool(torch.isclose(input, other, *options, **named).all())


@dtensor_handler(
    *("item", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    "_local_scalar_dense",  # by which torch's functions read a number, as torch.arange(x.max())
)
def _of_one_element(func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    if tensor.numel() != 1:  # torch raises
        return func(torch.zeros(()).expand(tensor.shape))
    with torch.no_grad():
        name = "item" if func is torch.ops.aten._local_scalar_dense.default else func.__name__
        return func(full_value(tensor, name))


@dtensor_handler("tolist")
def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    with torch.no_grad():
        return func(full_value(tensor, "tolist"))


@dtensor_rule("type")
def _type_name(input: Arg, dtype: Any = None, non_blocking: bool = False, **_: Any) -> RuleResult:
    if dtype is not None:
        return None
    return Decomposition(lambda input, *args, **kwargs: input._local_tensor.type())
