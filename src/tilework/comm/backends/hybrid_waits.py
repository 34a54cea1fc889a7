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
        self._idle: list[_Tasks] = []
        self._is_closed = False

    def run(self, wait: Callable[[], object], is_gone: Callable[[], bool]) -> None:
        """Block until ``wait()`` has returned, or the connection is gone.

        Args:
            wait: A wait of Gloo's. It keeps what Gloo uses alive, also when nobody waits for it.
            is_gone: True if it cannot be expected to return any more.

        Raises:
            RuntimeError: What ``wait`` raised; or the connection is gone.
        """
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = SimpleQueue()
            threading.Thread(
                target=_serve, args=(tasks,), name="tilework-transfer", daemon=True
            ).start()
        outcome: _Outcome = SimpleQueue()
        tasks.put((wait, outcome))
        while True:
            try:
                error = outcome.get(timeout=_LOOK_SECONDS)
                break
            except Empty:
                if is_gone():
                    tasks.put(None)  # once it comes back, if ever
                    raise RuntimeError("the connection ended within a message") from None
        self._idle.append(tasks)
        if self._is_closed:
            self.close()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads that are idle; others end when they are."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        wait, outcome = task
        error = None
        try:
            wait()
        except RuntimeError as failure:
            # Its traceback would hold torch's objects, and they Gloo's connections.
            error = failure.with_traceback(None)
        del task, wait
        outcome.put(error)
        del outcome, error
