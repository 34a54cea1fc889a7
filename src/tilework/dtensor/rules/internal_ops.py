"""Operators on DTensors that torch lacks; rules compose torch's operators from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tilework.dtensor.propagation.dtensor_call import tensors_in
from tilework.dtensor.tensor import DTensor
from tilework.tiled import RuleFunction, register

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def internal_operator(answer: RuleFunction) -> Callable[[FunctionT], FunctionT]:
    """Make the decorated function, of plain tensors, an operator on DTensors, with a rule."""

    def put(function: FunctionT) -> FunctionT:
        register(function, dtensor_rule=answer)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if any(isinstance(tensor, DTensor) for tensor in tensors_in(args)):
                return DTensor._dispatch(function, args, {})
            return function(*args)

        return call  # type: ignore[return-value]

    return put


def reduce_partial(tensor: Tensor) -> Tensor:
    """Reduce partial values of a DTensor once, for several uses. Collective if there are any."""
    if isinstance(tensor, DTensor) and tensor._spec.partial_axes:
        dual = tensor._spec.dual
        return tensor.redistribute(placements=dual.placements, order=dual.order)
    return tensor
