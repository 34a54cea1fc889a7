"""The line on stderr that says which rank is late: after some seconds, then ever more rarely."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from functools import cached_property

from tilework.store.checks import first_few, show_key

#: Seconds until the first line; 0, or anything that is no number: none at all.
LATE_VARIABLE = "TILEWORK_LATE_SECONDS"
_DEFAULT_SECONDS = 15.0
#: Each line comes after so many times the wait of the one before.
_FACTOR = 3.0
_KEYS_SHOWN = 8


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
    """The timing of the lines that one wait, begun at ``begun``, prints on stderr while it lasts
    long.

    The first line is due after ``TILEWORK_LATE_SECONDS``; each later line when the wait has lasted
    three times as long as at the line before. The caller asks :meth:`due`, then calls :meth:`tell`.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._next = begun + late_seconds()
        #: Counts the lines, so that ranks that wait for the same can share them.
        self.number = 0

    def due(self, now: float) -> bool:
        """True if a line is to be printed at the time ``now``; the line then counts as printed."""
        if now < self._next:
            return False
        self.number += 1
        self._next = now + (_FACTOR - 1) * (now - self._begun)
        return True

    def left(self) -> float:
        """Seconds until it is time for the next line."""
        return max(0.0, self._next - time.monotonic())

    def tell(self, text: str) -> None:
        """Print ``text`` on stderr, after the seconds that the wait has lasted."""
        waited = time.monotonic() - self._begun
        print(f"tilework: after {waited:.0f} s {text}", file=sys.stderr, flush=True)


class KeyWait:
    """Prints lines on stderr while a wait for keys of a store lasts long.

    ``what`` is the thing that is waited for, in words, if it is not keys.
    """

    def __init__(self, store: object, keys: Sequence[bytes] = (), what: str = "") -> None:
        self._store, self._keys, self._what = store, keys, what
        self._begun = time.monotonic()

    @cached_property
    def _notice(self) -> LateNotice:
        return LateNotice(self._begun)

    def pause(self, seconds: float) -> float:
        """The seconds to wait before :meth:`look` is called again, at most ``seconds``."""
        return min(seconds, self._notice.left() + 0.001)

    def look(self, missing: Sequence[bytes] | None = None) -> None:
        """Print a line if one is due, about the keys that are known to be missing (None: all)."""
        if not self._notice.due(time.monotonic()):
            return
        missing = self._keys if missing is None else missing
        keys = first_few([show_key(key) for key in missing], _KEYS_SHOWN)
        what = self._what or (f"key {keys}" if len(missing) == 1 else f"all of the keys {keys}")
        self._notice.tell(f"this rank waits for {what} in {self._store!r}")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4``; at most 16 are named."""
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
