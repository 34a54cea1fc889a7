"""Threads for callbacks that may block."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_Task = Callable[[], None]


class _Threads:
    """As many threads as there are tasks at once; each is kept for later ones."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._lock = threading.Lock()
        #: Threads that wait for a task which nobody has handed in yet.
        self._idle = 0

    def run_soon(self, task: _Task) -> None:
        """Run ``task`` on a thread of its own, before or after this returns. Never blocks."""
        with self._lock:
            start = self._idle == 0
            self._idle -= not start
        self._tasks.put(task)
        if start:
            threading.Thread(target=self._work, name="tilework callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._idle += 1


_threads = _Threads()
run_soon = _threads.run_soon

if hasattr(os, "register_at_fork"):
    # A forked child has none of these threads.
    os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]
