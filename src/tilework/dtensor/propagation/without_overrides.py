"""torch's functions in Python, without their checks for tensors that override them.

Such a function first asks ``has_torch_function`` whether a subclass takes over. Without that check
it is computed by the operators that it calls, which DTensors then meet.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


class _TorchWithoutChecks:
    """The module ``torch``, whose override checks are always False."""

    overrides = types.SimpleNamespace(**dict.fromkeys(_CHECKS, _never))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _globals_of(module: str) -> dict[str, Any]:
    return {**vars(sys.modules[module]), **dict.fromkeys(_CHECKS, _never)}


@cache
def without_override_checks(func: Any) -> Callable[..., Any] | None:
    """The same Python function without override checks; None if the function has no checks."""
    if not isinstance(func, types.FunctionType):
        return None
    if not set(_CHECKS) & set(func.__code__.co_names):
        return None
    scope = _globals_of(func.__module__) if func.__module__ in sys.modules else None
    if scope is None or func.__globals__.get("__name__") != func.__module__:
        scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
    if "overrides" in func.__code__.co_names:
        scope = {**scope, "torch": _TorchWithoutChecks()}
    unchecked = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
    )
    unchecked.__kwdefaults__ = func.__kwdefaults__
    return unchecked
