"""The decorator for functions that other ranks call and whose result comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK: Final = "_tilework_rpc_async"


def async_execution(fn: _Function) -> _Function:
    """Mark ``fn`` as a function that returns a ``torch.futures.Future`` of the result.

    A rank that calls ``fn`` by RPC gets the value of the future once the future is complete; no
    thread waits for it meanwhile. Write ``@staticmethod`` or ``@classmethod`` above this decorator.

    Example: see docs/how-to/rpc.md.
    """
    setattr(fn, _MARK, True)
    return fn


def is_async(fn: Callable[..., Any]) -> bool:
    """True if ``fn`` is marked by :func:`async_execution`."""
    return bool(getattr(fn, _MARK, False))
