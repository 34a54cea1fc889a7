"""Threads that receive messages and run the tasks in them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tilework.rpc.calls import Task


class ThreadPool:
    """Threads that take turns at receiving a task; the thread that received it runs it.

    No task is handed from thread to thread. Before a thread runs a task, it leaves the turn to
    another thread: a function that blocks holds up no messages. There is always a thread that
    receives, or waits to.

    Args:
        receive: Waits for the next task and returns it; None at the end. Threads call it in turn.
        idle: The number of idle threads that are kept for later tasks.
        name: The threads' name.
    """

    def __init__(self, receive: Callable[[], Task | None], idle: int, name: str) -> None:
        self._receive, self._keep, self._name = receive, idle, name
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        #: Threads that receive, or wait for their turn.
        self._idle: set[threading.Thread] = set()
        self._ended = False

    def start(self) -> None:
        """Begin to receive."""
        with self._lock:
            self._add()

    def _add(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        # Without one more thread, messages wait until a task has ended.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._idle.add(thread)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._turn:
                task = None if self._ended else self._receive()
                if task is None:
                    self._ended = True
                    return
                with self._lock:
                    self._idle.discard(me)
                    if not self._idle:
                        self._add()
            task()
            del task  # what it holds must not live until the next one
            with self._lock:
                if len(self._idle) >= self._keep:
                    return
                self._idle.add(me)

    def join(self) -> None:
        """Wait until no thread receives. Call this once ``receive`` returns None or soon will."""
        with self._lock:
            idle = list(self._idle)
        for thread in idle:
            if thread is not threading.current_thread():
                thread.join()
