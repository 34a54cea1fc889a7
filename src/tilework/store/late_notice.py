"""The line on stderr that says which rank is late: after some seconds, then ever more rarely."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence

#: Seconds until the first line; 0, or anything that is no number: none at all.
LATE_VARIABLE = "TILEWORK_LATE_SECONDS"
_DEFAULT_SECONDS = 15.0
#: Each line comes after so many times the wait of the one before.
_FACTOR = 3.0


def late_seconds() -> float:
    """The setting of TILEWORK_LATE_SECONDS; infinity where no line is wanted."""
    text = os.environ.get(LATE_VARIABLE)
    if text is None:
        return _DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:  # a diagnostic must not stop a program
        return math.inf
    return seconds if seconds > 0 else math.inf


class LateNotice:
    """The lines of one wait.

    Args:
        begun: When it began (time.monotonic()).
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._next = begun + late_seconds()
        #: Counts the lines, so that ranks that wait for the same can share them.
        self.number = 0

    def due(self, now: float) -> bool:
        """True if it is time for a line; that one then counts as printed."""
        if now < self._next:
            return False
        self.number += 1
        self._next = now + (_FACTOR - 1) * (now - self._begun)
        return True

    def tell(self, text: str) -> None:
        """Print a line on stderr."""
        waited = time.monotonic() - self._begun
        print(f"tilework: after {waited:.0f} s {text}", file=sys.stderr, flush=True)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4``; not too many of them."""
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
