"""Tensors in the arguments and results of operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def with_tensors(args: Args, kwargs: Kwargs, tensors: Iterator[Any]) -> tuple[list[Any], Kwargs]:
    """The arguments of a call with the tensors replaced by ``tensors``, in order."""
    return (
        [_substituted(arg, tensors) for arg in args],
        {name: _substituted(arg, tensors) for name, arg in kwargs.items()},
    )


def _substituted(value: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    kind = value.__class__
    if kind is list or kind is tuple:
        return kind([_substituted(item, tensors) for item in value])
    if kind is dict:
        return {name: _substituted(item, tensors) for name, item in value.items()}
    return value


def tensors_in(result: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in tensors_in(item)]
    return []


def rebuilt(result: Any, tensors: Iterator[Any]) -> Any:
    """A result with the tensors replaced by ``tensors``, in order."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, list):
        return [rebuilt(item, tensors) for item in result]
    if isinstance(result, tuple):
        items = [rebuilt(item, tensors) for item in result]
        if type(result) is tuple:
            return tuple(items)
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result
