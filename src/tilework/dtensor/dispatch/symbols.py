"""Errors of operators that are written as symbols: ``a + b``, ``a == b``, ``a += b``."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

_SYMBOLS = ("BINARY_", "INPLACE_", "COMPARE_", "CONTAINS_")


def as_seen_by_symbols(func: Any, error: TypeError) -> Exception:
    """The error, of a class that reaches the program where it wrote a symbol.

    There torch makes NotImplemented of a TypeError. Python would then say that it knows no such
    operator, or that tensors are not equal, or compute ``a = a + b`` for ``a += b``.

    Args:
        func: The operator.
        error: The error where the program calls it by name.

    Example:
        >>> import torch
        >>> type(as_seen_by_symbols(torch.Tensor.__eq__, TypeError("no"))).__name__
        'RuntimeError'
    """
    is_symbol = getattr(func, "__name__", "").startswith("__") or _is_at_symbol()
    return RuntimeError(str(error)) if is_symbol else error


def _is_at_symbol() -> bool:
    """True if the program, and not this library or torch, is at an operator in its bytecode."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("tilework", "torch"):
            break
        frame = frame.f_back
    if frame is None:
        return False
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return name.startswith(_SYMBOLS)
