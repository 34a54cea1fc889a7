"""Marks on functions that others call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK: Final = "_tilework_rpc_async"


def async_execution(fn: _Function) -> _Function:
    """Mark ``fn`` as a function that returns a ``torch.futures.Future`` of the result.

    The caller gets the future's value when it is there, and no thread waits for that meanwhile.
    With ``@staticmethod`` or ``@classmethod``, those come first (above).

    Example:
        >>> import torch
        >>> @async_execution
        ... def later():
        ...     return torch.futures.Future()
    """
    setattr(fn, _MARK, True)
    return fn


def is_async(fn: Callable[..., Any]) -> bool:
    """True if ``fn`` is marked so."""
    return bool(getattr(fn, _MARK, False))
