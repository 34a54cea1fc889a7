"""Threads for callbacks that may block."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_Task = Callable[[], None]


#: Seconds that a thread without a task is kept.
_IDLE_SECONDS = 0.5
#: Seconds that the end of a process waits for callbacks: before a message, and at most.
_WORD_SECONDS, _LIMIT_SECONDS = 3.0, 60.0


class _Threads:
    """Threads that run the callbacks of futures, one per running task; idle threads end."""

    def __init__(self) -> None:
        #: None ends the thread that takes it.
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        #: The number of submitted tasks that have not ended.
        self._open = 0
        self._ended = threading.Condition(self._lock)
        #: Futures whose callbacks have not been called.
        self._expected = 0
        #: The number of idle threads that no submitted task needs.
        self._idle = 0

    def run_soon(self, task: _Task) -> None:
        """Run ``task`` on a separate thread, before or after this returns. Never blocks."""
        with self._lock:
            start = self._idle == 0
            self._idle -= not start
        if start:  # start first: the interpreter refuses it near its end
            threading.Thread(target=self._work, name="tilework callbacks", daemon=True).start()
        with self._lock:
            self._open += 1
        self._tasks.put(task)

    def expect_callback(self) -> None:
        """Count a future with callbacks: :meth:`are_due` is True until none is left."""
        with self._lock:
            self._expected += 1

    def callback_ended(self) -> None:
        """Remove a future from the count of :meth:`expect_callback`."""
        with self._lock:
            self._expected -= 1

    def are_due(self) -> bool:
        """True if a callback is running, or a future with callbacks is not done."""
        return self._open > 0 or self._expected > 0

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                continue
            if task is None:
                return
            try:
                task()
            finally:
                with self._lock:
                    self._idle += 1
                    self._open -= 1
                    self._ended.notify_all()

    def end_idle(self) -> None:
        """End idle threads, since no task may come for long. Does not wait."""
        with self._lock:
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._tasks.put(None)

    def finish(self, word: float = _WORD_SECONDS, limit: float = _LIMIT_SECONDS) -> bool:
        """Wait for all tasks, before the interpreter unwinds their threads; False: too late."""
        with self._ended:
            if self._ended.wait_for(lambda: not self._open, word):
                return True
            self._say(f"waits for {self._open} callbacks of futures to return")
            if self._ended.wait_for(lambda: not self._open, limit - word):
                return True
            self._say(
                f"{self._open} callbacks of futures have not returned within {limit:g} s, and are "
                f"left: what they wait for never came"
            )
            return False

    def _say(self, what: str) -> None:
        with contextlib.suppress(Exception):  # stderr may be gone
            print(f"tilework: the process ends, and {what}", file=sys.stderr, flush=True)


_threads = _Threads()
run_soon = _threads.run_soon
end_idle_threads = _threads.end_idle
finish_callbacks = _threads.finish
expect_callback, callback_ended = _threads.expect_callback, _threads.callback_ended
callbacks_due = _threads.are_due

if hasattr(os, "register_at_fork"):
    # A forked child has none of these threads.
    os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]
