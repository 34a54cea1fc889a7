"""Operators that torch has not, of which several of torch's are composed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tilework.dtensor.registry import RULES, Rule, RuleFunction
from tilework.dtensor.tensor import DTensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def operator(answer: RuleFunction) -> Callable[[FunctionT], FunctionT]:
    """Make the decorated function an operator on DTensors, with ``answer`` as its rule.

    It is given plain tensors, and does on whole ones what the operator is meant to do.
    """

    def put(function: FunctionT) -> FunctionT:
        RULES[function] = Rule(answer)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if any(isinstance(arg, DTensor) for arg in args):
                return DTensor._run(function, args, {})
            return function(*args)

        return call  # type: ignore[return-value]

    return put


def settled(tensor: Tensor) -> Tensor:
    """The tensor with all terms combined, for what is used more than once."""
    if isinstance(tensor, DTensor) and tensor._spec.partial_axes:
        return tensor.redistribute(placements=tensor._spec.dual.placements)
    return tensor


def tied(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """``result`` as a function of inputs that it does not depend on.

    A rank with nothing to compute has to be in the graph nevertheless: others wait for it there.
    """
    for one in inputs:
        if one is not None:
            result = result + one.reshape(-1)[:0].sum().to(result.dtype)
    return result
