"""Names of torch's operators: one canonical name for all functions, methods and aliases of each."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

#: Python's operator methods, by the operator.
_DUNDERS = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__div__": "div",
    "__matmul__": "matmul",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__pow__": "pow",
    "__neg__": "neg",
    "__pos__": "positive",
    "__abs__": "abs",
    "__invert__": "bitwise_not",
    "__and__": "bitwise_and",
    "__rand__": "bitwise_and",
    "__or__": "bitwise_or",
    "__ror__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__rxor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
}
#: Aliases of operators.
_ALIASES = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "true_divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "row_stack": "vstack",
}
_PREFIXES = ("special_", "_VF_")


def packet_of(func: Any) -> Any:
    """The operator of an overload such as ``torch.ops.aten.add.Tensor``; else the function."""
    return getattr(func, "overloadpacket", func)


def foreign_name(func: Any) -> str | None:
    """The full name of an operator or function from outside torch; None for torch's.

    The canonical name of such a function may be the name of an operator of torch.
    """
    packet = packet_of(func)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        name: str = packet._qualified_op_name
        return None if name.startswith(("aten::", "prims::")) else name
    if not isinstance(func, FunctionType) or not func.__module__:
        return None
    is_known = func.__module__.partition(".")[0] in ("torch", "tilework")
    return None if is_known else f"{func.__module__}.{func.__name__}"


def canonical_name(func: Any) -> tuple[str, bool]:
    """The operator's name, and whether this form writes to the first argument.

    Example:
        >>> import torch
        >>> canonical_name(torch.Tensor.add_), canonical_name(torch.special.expm1)
        (('add', True), ('expm1', False))
    """
    name: str = getattr(packet_of(func), "__name__", None) or type(func).__name__
    if name == "__get__" or name == "__set__":
        return f"{func.__self__.__name__}.{name}", False
    in_place = False
    if name.startswith("__i") and name.endswith("__") and f"__{name[3:]}" in _DUNDERS:
        name, in_place = _DUNDERS[f"__{name[3:]}"], True
    elif name.endswith("_") and not name.endswith("__"):
        name, in_place = name[:-1], True
    name = _DUNDERS.get(name, name)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _ALIASES.get(name, name), in_place


def overloads_of(packet: Any) -> list[Any]:
    """The overloads of torch's operator, given as an object or by name in ``torch.ops.aten``."""
    if isinstance(packet, str):
        packet = getattr(torch.ops.aten, packet, None)
    names = packet.overloads() if hasattr(packet, "overloads") else ()
    return [getattr(packet, name) for name in names]


def schemas_of(packet: Any) -> list[Any]:
    """The schemas of an operator's overloads."""
    return [overload._schema for overload in overloads_of(packet)]
