"""How many things have begun and not ended."""

from __future__ import annotations

import math
import threading
import time


class InFlight:
    """Counts what begins and ends.

    Example:
        >>> tally = InFlight()
        >>> tally.begin()
        >>> tally.wait_none(time.monotonic() + 0.01), tally.total
        (False, 1)
        >>> tally.end()
        >>> tally.wait_none(math.inf)
        True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        #: How many have ever begun.
        self.total = 0

    def begin(self) -> None:
        """One has begun."""
        with self._changed:
            self._now += 1
            self.total += 1

    def end(self) -> None:
        """One has ended."""
        with self._changed:
            self._now -= 1
            if not self._now:
                self._changed.notify_all()

    def wait_none(self, deadline: float) -> bool:
        """Wait until all have ended; whether that came before ``deadline`` (time.monotonic())."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with self._changed:
            return self._changed.wait_for(lambda: not self._now, left)
