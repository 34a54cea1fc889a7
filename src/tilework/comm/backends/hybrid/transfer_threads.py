"""Waits for Gloo's transfers that end with their connections.

Gloo (as of torch 2.13) wakes nobody who waits for a message that is half sent or half received when
its connection ends, by a kill of the other process, a cut link, or a close of its own. So the wait
is on another thread, which is left to itself once the connection is known to be gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

#: Seconds between looks whether a connection is gone.
_LOOK_SECONDS = 0.05

_Outcome = SimpleQueue[RuntimeError | None]
#: What a thread is to wait in, and where it says how that ended; None: it ends.
_Tasks = SimpleQueue[tuple[Callable[[], object], _Outcome] | None]


class TransferWaits:
    """Threads that wait in Gloo, for one or several others at a time."""

    def __init__(self) -> None:
        self._idle = [_started()]
        self._is_closed = False

    def run(self, wait: Callable[[], object], is_gone: Callable[[], bool]) -> RuntimeError | None:
        """Block until ``wait()`` has returned, or the connection is gone.

        Args:
            wait: A wait of Gloo's. It keeps what Gloo uses alive, also when nobody waits for it.
            is_gone: True if it cannot be expected to return any more.

        Returns:
            What ``wait`` raised, or that the connection is gone; None if it succeeded. It is not
            raised: a traceback would hold torch's objects, and they Gloo's connections.
        """
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = _started()
        outcome: _Outcome = SimpleQueue()
        tasks.put((wait, outcome))
        ended = False
        try:
            while not ended:
                try:
                    error = outcome.get(timeout=_LOOK_SECONDS)
                    ended = True
                except Empty:
                    if is_gone():
                        return RuntimeError("the connection ended within a message")
        finally:
            if ended and not self._is_closed:
                self._idle.append(tasks)
            else:
                tasks.put(None)  # it ends when it comes back, if ever
        return error

    def close(self) -> None:
        """End the threads that are idle; others end when they are."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)


def _started() -> _Tasks:
    """The tasks of a new thread."""
    tasks: _Tasks = SimpleQueue()
    thread = threading.Thread(target=_serve, args=(tasks,), name="tilework-transfer", daemon=True)
    thread.start()
    return tasks


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        wait, outcome = task
        error = None
        try:
            wait()
        except RuntimeError as failure:
            error = failure.with_traceback(None)
        del task, wait
        outcome.put(error)
        del outcome, error
