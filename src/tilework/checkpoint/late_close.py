"""Closing of removed files in the background.

The system frees a removed file when its last descriptor is closed; for a large file that takes a
tenth of a second and more. No save needs to wait for it, except the next one, which may need the
room.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

#: If more than this wait, the remover closes a file at once.
_MOST_WAITING = 64


class LateClose:
    """Closes file descriptors in a thread, which runs while there are any to close."""

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            # A forked child has the descriptors, but not the thread.
            os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin(self) -> None:
        self._waiting: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_at_work = False

    def _begin_in_child(self) -> None:
        waiting = self._waiting
        self._begin()
        for descriptor in waiting:
            _close(descriptor)

    def add(self, descriptor: int) -> None:
        """Let the thread close a descriptor; close it here only if many are waiting. Local."""
        with self._changed:
            is_full = len(self._waiting) >= _MOST_WAITING
            if not is_full:
                self._waiting.append(descriptor)
            starts = not is_full and not self._is_at_work
            self._is_at_work |= starts
        if is_full:
            _close(descriptor)
        if starts:
            try:
                threading.Thread(target=self._work, name="late close", daemon=True).start()
            except RuntimeError:  # no more threads
                self._work()

    def wait(self) -> None:
        """Block until all descriptors are closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_at_work)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_at_work = False
                    self._changed.notify_all()
                    return
                descriptor = self._waiting.popleft()
            _close(descriptor)


def _close(descriptor: int) -> None:
    with suppress(OSError):  # on a network file system: it is still closed
        os.close(descriptor)


#: The thread of this process.
late_close = LateClose()
