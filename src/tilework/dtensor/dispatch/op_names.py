"""What torch calls its functions, and what is done when one of them meets a DTensor."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.op_table import RULES

#: Called with the function, its arguments, and its keyword arguments.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: What to do for each function of torch's; found when it is first met.
HANDLERS: dict[Any, Handler] = {}
#: Handlers of functions that are no operators (questions, gradients, …), by canonical name.
SPECIAL: dict[str, Handler] = {}

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
#: Other names of the same operators.
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


def canonical(func: Any) -> tuple[str, bool]:
    """The operator's name, and whether this form of it writes to its first argument.

    Example:
        >>> import torch
        >>> canonical(torch.Tensor.add_), canonical(torch.special.expm1)
        (('add', True), ('expm1', False))
    """
    packet = getattr(func, "overloadpacket", func)
    name: str = getattr(packet, "__name__", None) or type(func).__name__
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


#: Functions in Python that draw random numbers as plain tensors, which ranks have to do alike.
_DRAWING_IN_PYTHON = {
    *("svd_lowrank", "pca_lowrank"),
    *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
}
#: And operators of which torch does not say that they do.
_DRAWING = {"rrelu", "feature_dropout", "feature_alpha_dropout", *_DRAWING_IN_PYTHON}


@cache
def draws(name: str) -> bool:
    """Whether the operator of this canonical name draws random numbers.

    Example:
        >>> draws("bernoulli"), draws("add")
        (True, False)
    """
    if name in _DRAWING:
        return True
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    seeded = torch.Tag.nondeterministic_seeded
    return any(seeded in getattr(packet, overload).tags for overload in overloads)


def special(*names: str) -> Callable[[Handler], Handler]:
    """Register the decorated function as the handler of what has these canonical names."""

    def put(handler: Handler) -> Handler:
        for name in names:
            if name in SPECIAL or name in RULES:
                raise ValueError(f"{name!r} has a handler already")
            SPECIAL[name] = handler
        return handler

    return put


def forget(func: Any) -> None:
    """Let a function's handler be found anew."""
    packet = getattr(func, "overloadpacket", func)
    for known in list(HANDLERS):
        if known is func or getattr(known, "overloadpacket", known) is packet:
            del HANDLERS[known]


# -- torch's own Python ----------------------------------------------------------------------

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*_: Any) -> bool:
    return False


class _Unasking:
    """torch, but for its questions."""

    overrides = types.SimpleNamespace(**dict.fromkeys(_QUESTIONS, _no))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _globals_of(name: str) -> dict[str, Any]:
    found = dict(vars(sys.modules[name]))
    return {**found, **dict.fromkeys(_QUESTIONS, _no)}


@cache
def body_of(func: Any) -> Callable[..., Any] | None:
    """The same Python function without the question whether a subclass takes over.

    So it is computed by the operators that it calls, which DTensors then meet. None for what is
    not such a function.
    """
    if not isinstance(func, types.FunctionType) or func.__name__ in _DRAWING_IN_PYTHON:
        return None
    if not set(_QUESTIONS) & set(func.__code__.co_names):
        return None
    scope = _globals_of(func.__module__) if func.__module__ in _modules() else None
    if scope is None or func.__globals__.get("__name__") != func.__module__:
        scope = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _no)}
    if "overrides" in func.__code__.co_names:
        scope = {**scope, "torch": _Unasking()}
    made = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _modules() -> Mapping[str, Any]:
    return sys.modules


#: Properties that are operators.
GETTERS: dict[str, Callable[[Tensor], Any]] = {
    "T.__get__": lambda x: x.permute(tuple(range(x.dim()))[::-1]),
    "mT.__get__": lambda x: x.transpose(-2, -1),
    "H.__get__": lambda x: x.transpose(0, 1).conj() if x.dim() == 2 else x.conj(),
    "mH.__get__": lambda x: x.transpose(-2, -1).conj(),
    "real.__get__": torch.real,
    "imag.__get__": torch.imag,
    "nbytes.__get__": lambda x: x.numel() * x.element_size(),
}
