"""Waits for Gloo's transfers that also end when the connection ends.

A connection may end in the middle of a message: the other process is killed, the link is cut, or
the peer closes. Gloo (as of torch 2.13) does not wake the threads that wait then. So the wait runs
on another thread, which is abandoned once the connection is known to be gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

#: Seconds between looks whether a connection is gone.
_LOOK_SECONDS = 0.05

_Outcome = SimpleQueue[RuntimeError | None]
#: A wait to run, and the queue for the outcome; None: the thread ends.
_Tasks = SimpleQueue[tuple[Callable[[], object], _Outcome] | None]


class TransferWaits:
    """A pool of threads that run the waits in Gloo, so that a calling thread can give up."""

    def __init__(self) -> None:
        self._idle = [_started()]
        self._is_closed = False

    def run(self, wait: Callable[[], object], is_gone: Callable[[], bool]) -> RuntimeError | None:
        """Block until ``wait()`` has returned, or the connection is gone.

        Args:
            wait: A wait of Gloo. It must keep alive everything that Gloo uses, also after the
                caller gave up.
            is_gone: True if ``wait`` may never return.

        Returns:
            The error of ``wait``, or an error that the connection is gone; None on
            success. The error is not raised: a traceback would keep torch's objects and
            Gloo's connections.
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
                tasks.put(None)  # the thread ends if the wait ever returns
        return error

    def close(self) -> None:
        """End idle threads now, and busy threads when they become idle."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)


def _started() -> _Tasks:
    """Start a thread that runs waits; return the queue from which it takes them."""
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
