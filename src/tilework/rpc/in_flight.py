"""A count of things that have begun and not ended."""

from __future__ import annotations

import math
import threading
import time


class InFlight:
    """A counter of things that have begun and not ended, such as calls.

    Example:
        >>> in_flight = InFlight()
        >>> in_flight.begin()
        >>> in_flight.wait_none(time.monotonic() + 0.01), in_flight.total
        (False, 1)
        >>> in_flight.end()
        >>> in_flight.wait_none(math.inf)
        True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        #: The number that ever began.
        self.total = 0

    def begin(self) -> None:
        """Count one more."""
        with self._changed:
            self._now += 1
            self.total += 1

    def end(self) -> None:
        """Count one less."""
        with self._changed:
            self._now -= 1
            if not self._now:
                self._changed.notify_all()

    def wait_none(self, deadline: float) -> bool:
        """Wait until none is left; True if that came before ``deadline`` (time.monotonic())."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with self._changed:
            return self._changed.wait_for(lambda: not self._now, left)
