"""The functions that a thread calls now and then while it waits long for other ranks.

Every engine that is tilework's own calls them: those in Python by :func:`look`, the core by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

#: Seconds of waiting after which a wait is a long one.
AFTER_SECONDS = 0.3

_functions: list[Callable[[], None]] = []


def add_function(function: Callable[[], None]) -> None:
    """Add one that is called; it must be quick, and what it raises ends the wait. Idempotent."""
    if function in _functions:
        return
    _functions.append(function)
    if _core is not None:
        _core.set_long_wait(_call, AFTER_SECONDS)


def _call() -> None:
    for function in _functions:
        function()


def look(begun: float) -> None:
    """Call the function if the wait that began at ``begun`` (time.monotonic()) is a long one."""
    if time.monotonic() - begun > AFTER_SECONDS:
        _call()
