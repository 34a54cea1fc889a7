"""Operators that torch has not, of which several of torch's are composed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tilework.dtensor.tensor import DTensor
from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import LocalRanges, RuleFunction
from tilework.tiled.op_table import register

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def operator(answer: RuleFunction) -> Callable[[FunctionT], FunctionT]:
    """Make the decorated function an operator on DTensors, with ``answer`` as its rule.

    It is given plain tensors, and does on whole ones what the operator is meant to do.
    """

    def put(function: FunctionT) -> FunctionT:
        register(function, rule=answer)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if any(isinstance(arg, DTensor) for arg in args):
                return DTensor._dispatch(function, args, {})
            return function(*args)

        return call  # type: ignore[return-value]

    return put


class Span:
    """The part of a factor that this rank has, for look-ups by index."""

    def __init__(self, ranges: LocalRanges, factor: Factor) -> None:
        self.start, self.count = ranges.local_range(factor)
        self.total = factor.size
        self.all = not ranges.is_sharded(factor)

    def place(self, index: int | None) -> int | None:
        """Where an index is within the part; None if it is elsewhere."""
        here = index is not None and self.start <= index < self.start + self.count
        return index - self.start if here and index is not None else None

    def find(self, indices: Tensor, ignored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Where indices are within the part (0 for those elsewhere), and which are in it.

        Args:
            indices: Global ones.
            ignored: Which of them stand for none.

        Raises:
            IndexError: One is in no rank's part.
        """
        outside = (indices < 0) | (indices >= self.total)
        if ignored is not None:
            outside &= ~ignored
        if outside.any():
            raise IndexError(
                f"index out of range: {int(indices[outside][0])} is not in [0, {self.total})"
            )
        places = indices - self.start
        here = (places >= 0) & (places < self.count)
        if ignored is not None:
            here &= ~ignored
        return places.where(here, 0), here


def settled(tensor: Tensor) -> Tensor:
    """The tensor with all terms combined, for what is used more than once."""
    if isinstance(tensor, DTensor) and tensor._spec.partial_axes:
        dual = tensor._spec.dual
        return tensor.redistribute(placements=dual.placements, order=dual.order)
    return tensor


def tied(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """``result`` as a function of inputs that it does not depend on.

    A rank with nothing to compute has to be in the graph nevertheless: others wait for it there.
    """
    for one in inputs:
        if one is not None:
            result = result + one.reshape(-1)[:0].sum().to(result.dtype)
    return result
