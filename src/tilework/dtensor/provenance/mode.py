"""The mode of comparisons between ranks: compare nothing, samples, or everything."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, get_args

from tilework.comm.provenance_digest import VARIABLE
from tilework.comm.world import current_world

Mode = Literal["off", "sampled", "full"]
_MODES = get_args(Mode)

#: The number of ``verifying`` that are open, of all ranks of this process.
_open = 0
#: The number of times that a mode began or ended: a hash from before may differ from a new hash.
changes = 0
_lock = threading.Lock()


@dataclass(eq=False)
class _Chosen:
    """The open ``verifying`` of one rank, innermost last."""

    modes: list[Mode] = field(default_factory=list)


@cache
def _default() -> Mode:
    text = os.environ.get(VARIABLE) or "sampled"
    return _checked(text, f"the environment variable {VARIABLE}")


def _checked(text: str, what: str) -> Mode:
    for mode in _MODES:
        if mode == text:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"{what} must be one of {', '.join(_MODES)}, got {text!r}")


def mode() -> Mode:
    """The mode of this rank: that of the innermost ``verifying``, else of the environment.

    Example:
        >>> mode()
        'sampled'
    """
    if _open:
        modes = current_world().state(_Chosen).modes
        if modes:
            return modes[-1]
    return _default()


@contextmanager
def verifying(mode: Mode) -> Iterator[None]:
    """Set how thoroughly ranks are compared within the context. Local; open it on all ranks.

    ``"off"`` compares nothing. ``"sampled"``, the default, hashes a sample of large tensors, and
    compares parameters at every fourth step of an optimizer up to the 64th, later at every 16th, or
    at every 64th if steps take less than two milliseconds. ``"full"`` hashes every element, and
    compares parameters at each step. The environment variable ``TILEWORK_VERIFY`` sets the mode for
    the whole program.

    Args:
        mode: ``"off"``, ``"sampled"`` or ``"full"``.

    Raises:
        ValueError: The mode is none of these.

    Example:
        >>> with verifying("full"):
        ...     print(mode())
        full
    """
    checked = _checked(mode, "the mode of verifying()")
    modes = current_world().state(_Chosen).modes
    modes.append(checked)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        modes.pop()


def _count(more: int) -> None:
    global _open, changes
    with _lock:
        _open += more
        changes += 1
