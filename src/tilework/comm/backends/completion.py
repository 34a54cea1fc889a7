"""The completion of an operation that Python code runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tilework.comm.backends.engine_protocol import Fault, FaultArgs
from tilework.comm.waits import by_rank

#: Seconds between looks of a thread that waits without a limit.
_LOOK_SECONDS = 0.1


class PythonCompletion:
    """The completion of an operation that Python code runs. It ends once, with or without a fault.

    A thread that waits without a limit checks on the other ranks every ``look_seconds``.
    """

    def __init__(self, look_seconds: float = _LOOK_SECONDS) -> None:
        self._look_seconds = look_seconds
        self._changed = threading.Condition()
        self._done = False
        self._fault: FaultArgs | None = None
        self._callbacks: list[Callable[[], None]] = []
        #: For a receive: where the message came from.
        self.source_rank = -1
        #: When a thread first had to wait, and when the operation was done, on the monotonic clock;
        #: 0: not yet.
        self.waited_ns = self.finished_ns = 0

    def complete(self, fault: FaultArgs | None = None) -> None:
        """End the operation, with success if ``fault`` is None. The first call alone counts."""
        with self._changed:
            if self._done:
                return
            self.finished_ns = time.monotonic_ns()
            self._done, self._fault = True, fault
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._done

    def fault(self) -> FaultArgs | None:
        return self._fault

    def source(self) -> int:
        return self.source_rank

    def wait(self, timeout: float) -> bool:
        begun = time.monotonic()
        if not (self._done or self.waited_ns):
            self.waited_ns = time.monotonic_ns()
        while not self._done:
            with self._changed:
                limit = self._look_seconds if timeout < 0 else timeout
                if self._changed.wait_for(lambda: self._done, limit):
                    break
            if timeout >= 0:
                return False
            by_rank.look_if_long(begun)
        if self._fault is not None:
            raise Fault(*self._fault)
        return True

    def poll(self) -> bool:
        return self.done()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn()


#: Runs a call into an engine, and returns its fault.
Run = Callable[[Callable[[], object]], FaultArgs | None]


class TorchCompletion(PythonCompletion):
    """The completion of a message or collective that a backend of torch runs.

    torch cannot wait for a message for a moment only: a wait that times out closes all connections.
    So the wait is one call. It runs on the thread of a caller that waits without a limit, or on a
    separate thread if callers only poll. ``memory`` is kept alive while the engine may use it;
    ``timeout`` counts from the first wait.
    """

    def __init__(self, work: Any, memory: object, timeout: float, run: Run) -> None:
        super().__init__()
        self._kept: tuple[Any, object] | None = (work, memory)
        self._limit = timedelta(seconds=timeout)
        self._run = run
        self._started = threading.Lock()

    def _finish(self) -> None:
        fault = self._run(self._wait)
        self._kept = None
        self.complete(fault)

    def _wait(self) -> None:
        assert self._kept is not None
        work = self._kept[0]
        work.wait(self._limit)
        try:
            self.source_rank = int(work._source_rank())
        except RuntimeError:  # the message was a send
            return

    def _watch(self) -> None:
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._finish, name="tilework-message", daemon=True).start()

    def done(self) -> bool:
        self._watch()
        return super().done()

    def wait(self, timeout: float) -> bool:
        if timeout < 0 and self._started.acquire(blocking=False):
            self._finish()
        self._watch()
        return super().wait(timeout)

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._watch()
        super().add_done_callback(fn)
