"""The wish to stop a loop: after a signal, or when the time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Final

#: The reasons to stop, as text, the strongest last; the first is none. Ranks exchange the numbers.
REASONS: Final = ("", "the time limit", "SIGTERM")
_TIME_LIMIT, _SIGTERM = 1, 2


class Stopping:
    """The wish of this rank to stop. Ranks agree on it in each step.

    Args:
        limit: The time that the loop may take; None: no limit.
    """

    def __init__(self, limit: timedelta | None) -> None:
        self._deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        self._wish = 0

    @property
    def wish(self) -> int:
        """The number of this rank's reason to stop; 0 for none."""
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        return max(self._wish, _TIME_LIMIT if is_over else 0)

    def keep(self, reason: str) -> None:
        """Adopt a reason that other ranks have."""
        self._wish = max(self._wish, REASONS.index(reason))

    @contextlib.contextmanager
    def listening(self, warning: Callable[[], str]) -> Iterator[None]:
        """A context in which SIGTERM is a wish to stop; only in the main thread.

        Args:
            warning: Called at the signal: the line for stderr, "" for none.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._wish = _SIGTERM
            # Not print: it raises if the signal interrupted another print.
            os.write(2, warning().encode())

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
