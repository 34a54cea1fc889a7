"""Names of arguments: those that torch takes besides its own, from numpy and from aliases."""

from __future__ import annotations

from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from tilework.tiled.op_names import canonical_name

#: Names that torch's parser takes for its own, where a signature has the latter.
_OTHERS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}


def torch_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, named ones by torch's own names, its first tensor by position.

    Example:
        >>> import torch
        >>> torch_arguments(torch.softmax, (), {"x": 1, "axis": 0})
        ((1,), {'dim': 0})
        >>> torch_arguments(torch.trapezoid, (), {"y": 1, "x": 2})
        ((1,), {'x': 2})
    """
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType):  # torch's parser is C++
        return args, kwargs
    if args and _OTHERS.keys().isdisjoint(kwargs):
        return args, kwargs
    own, first = _own_names(func.__name__, canonical_name(func)[0])
    kwargs = {
        name if name in own else _OTHERS.get(name, name): value for name, value in kwargs.items()
    }
    if not args and first in kwargs:
        args = (kwargs.pop(first),)
    return args, kwargs


@cache
def _own_names(*names: str) -> tuple[frozenset[str], str]:
    """The names of the arguments of operators, and that of the first, if all begin with one."""
    every: set[str] = set()
    firsts: set[str] = set()
    for name in names:
        packet: Any = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet else ():
            arguments = getattr(packet, overload)._schema.arguments
            if any("Tensor" in str(each.type) for each in arguments):  # others are TorchScript's
                every.update(each.name for each in arguments)
                firsts.add(arguments[0].name)
    first = firsts.pop() if len(firsts) == 1 else ""
    return frozenset(every), "input" if first == "self" else first
