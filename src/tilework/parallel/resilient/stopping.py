"""The wish to stop a loop: a signal, or a time that is over."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType


class Stopping:
    """The wish of this rank to stop. Ranks agree on it in each step.

    Args:
        limit: The time that the loop may take; None: any.
    """

    def __init__(self, limit: timedelta | None) -> None:
        self._deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        self._signal: int | None = None
        self._wish = ""

    @property
    def reason(self) -> str:
        """The reason to stop, for a person; empty if there is none."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "the time limit"
        return self._wish

    def wish(self, reason: str) -> None:
        """Make a reason that other ranks have this rank's own."""
        self._wish = reason

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a wish to stop meanwhile; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
