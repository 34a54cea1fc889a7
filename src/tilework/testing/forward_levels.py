"""Forward-mode differentiation on ranks that are threads: a single rank at a time.

torch has one level of forward-mode differentiation for the whole process (``torch.func.jvp``,
``jacfwd``, ``torch.autograd.forward_ad``). A rank that would enter it while another rank is in it
waits for its turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from tilework.comm.flight.ring import RUNNING
from tilework.comm.waits.by_rank import AFTER_SECONDS
from tilework.comm.world import World, current_world

#: The functions that enter the level or leave it: (their module, entering, leaving).
_PLACES: Final[tuple[tuple[Any, str, str], ...]] = (
    (forward_ad, "enter_dual_level", "exit_dual_level"),
    (eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
)
_POLL_SECONDS = 0.02


class _Turns:
    """The rank in the level, and the number of times that the rank has entered it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: tuple[World, threading.Thread] | None = None
        self._depth = 0

    def enter(self) -> None:
        """Wait until no other rank is in the level. Raise if that rank waits for other ranks."""
        me, begun = (current_world(), threading.current_thread()), time.time()
        with self._changed:
            while self._owner not in (None, me) and self._owner[1].is_alive():
                if time.time() - begun > AFTER_SECONDS:
                    _refuse_waiting(self._owner[0], begun)
                self._changed.wait(_POLL_SECONDS)
            self._depth = self._depth + 1 if self._owner == me else 1
            self._owner = me

    def leave(self) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()


def _refuse_waiting(owner: World, begun: float) -> None:
    """Raise if ``owner`` has waited for other ranks since ``begun``, or longer."""
    for group in tuple(owner.records):
        for entry in group.flight_entries():
            if entry.outcome == RUNNING and entry.entered < time.time() - AFTER_SECONDS:
                raise RuntimeError(
                    f"rank {owner.local_rank} communicates ({entry.what} at {entry.site}) within "
                    f"forward-mode differentiation (torch.func.jvp, jacfwd, dual_level), which "
                    f"torch has once for all ranks that are threads: run the ranks as processes, "
                    f"run_ranks(..., kind='processes')"
                )


_lock = threading.Lock()
_users = 0
_turns = _Turns()


@contextmanager
def level_in_turns() -> Iterator[None]:
    """Let a single rank of this process at a time be in torch's level of forward mode."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(more: int) -> None:
    global _users
    with _lock:
        _users += more
        if _users == more == 1:
            for place, enter, leave in _PLACES:
                setattr(place, enter, _entering(getattr(place, enter)))
                setattr(place, leave, _leaving(getattr(place, leave)))
        elif not _users:
            for place, *names in _PLACES:
                for name in names:
                    setattr(place, name, getattr(place, name).__wrapped__)


def _entering(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        _turns.enter()
        try:
            return function(*args, **kwargs)
        except BaseException:
            _turns.leave()
            raise

    return enter


def _leaving(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def leave(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            _turns.leave()

    return leave
