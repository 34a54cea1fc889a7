"""Public operations whose usual calls go straight to the core, without a Python frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tilework.optional_core import core as _core

_Function = TypeVar("_Function", bound=Callable[..., Any])


def core_first(inputs: str = "", outputs: str = "") -> Callable[[_Function], _Function]:
    """A decorator for public operations, which lets the core try each call before the function.

    The core takes calls on groups with a fast path whose tensors need no preparation. The function
    gets all other calls, and every call while a profiler watches. So the function must do the same
    as the core, which knows the operation by the function's name. ``inputs`` and ``outputs`` name
    the parameters for the tensors that are read and written on this rank; "" for none.
    docs/algorithms/entrances.md shows all entrances of the core.
    """
    if _core is None:
        return lambda function: function
    return lambda function: _core.fast_function(function, inputs, outputs)
