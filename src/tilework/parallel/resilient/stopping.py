"""The wish to stop a loop: a signal, or a time that is over."""

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

#: The reasons to stop, for a person, the weightier last; first: none. Ranks exchange the numbers.
REASONS: Final = ("", "the time limit", "SIGTERM")
_TIME_LIMIT, _SIGTERM = 1, 2


class Stopping:
    """The wish of this rank to stop. Ranks agree on it in each step.

    Args:
        limit: The time that the loop may take; None: any.
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
        """Make a reason that other ranks have this rank's own."""
        self._wish = max(self._wish, REASONS.index(reason))

    @contextlib.contextmanager
    def listening(self, warning: Callable[[], str]) -> Iterator[None]:
        """Take SIGTERM as a wish to stop meanwhile; in the main thread only.

        Args:
            warning: Called at the signal: the line for stderr, "" for none.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._wish = _SIGTERM
            # Not print: the signal may have come in the middle of one, which raises.
            os.write(2, warning().encode())

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
