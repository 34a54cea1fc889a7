"""Forward-mode differentiation on ranks that are threads: a single rank at a time.

torch has one level of forward-mode differentiation for the whole process (``torch.func.jvp``,
``jacfwd``, ``torch.autograd.forward_ad``). A rank that would enter it while another rank is in it
waits for its turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Final

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from tilework.comm.per_call.internal import AFTER_SECONDS, RUNNING
from tilework.comm.world import World, current_world

#: The functions that enter the level or leave it: (their module, entering, leaving).
_PLACES: Final[tuple[tuple[Any, str, str], ...]] = (
    (forward_ad, "enter_dual_level", "exit_dual_level"),
    (eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
)
_level = threading.RLock()
#: The rank that was the last to enter, and its thread.
_owner: tuple[World, threading.Thread] | None = None


@cache
def take_turns() -> None:
    """From now on, let a single thread of this process at a time be in torch's forward mode."""
    for place, enter, leave in _PLACES:
        setattr(place, enter, _entering(getattr(place, enter)))
        setattr(place, leave, _leaving(getattr(place, leave)))


def _entering(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        global _owner
        while not _level.acquire(timeout=AFTER_SECONDS):
            _refuse_waiting()
        _owner = current_world(), threading.current_thread()
        try:
            return function(*args, **kwargs)
        except BaseException:
            _level.release()
            raise

    return enter


def _leaving(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def leave(*args: Any, **kwargs: Any) -> Any:
        if _owner is None or _owner[1] is not threading.current_thread():
            return None  # entering was refused
        try:
            return function(*args, **kwargs)
        finally:
            _level.release()

    return leave


def _refuse_waiting() -> None:
    """Raise if the rank that is in the level waits for other ranks, or has ended."""
    if _owner is None:
        return
    world, thread = _owner
    if not thread.is_alive():
        raise RuntimeError(f"{thread.name} ended without exit_dual_level(): torch's level is open")
    for group in tuple(world.records):
        for entry in group.flight_entries():
            if entry.outcome == RUNNING and entry.entered < time.time() - AFTER_SECONDS:
                raise RuntimeError(
                    f"another rank communicates ({entry.what} at {entry.site}) within forward-mode "
                    f"differentiation (torch.func.jvp, jacfwd, dual_level), which torch has once "
                    f"for all ranks that are threads: run_ranks(..., kind='processes') runs each "
                    f"in a process"
                )
