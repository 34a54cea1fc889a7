"""The completion of an operation that Python code runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tilework.comm.backends.engine_protocol import Fault, FaultArgs
from tilework.comm.waits import by_rank

#: Seconds between looks of a thread that waits without a limit.
_LOOK_SECONDS = 0.1


class PythonCompletion:
    """The completion of an operation that Python code runs. It ends once, with or without a fault.

    Args:
        look_seconds: The seconds between checks on the other ranks, in a thread that waits without
            a limit.
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
        """End the operation, with success if ``fault`` is None, and call the callbacks. Only the
        first call has an effect.
        """
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
        while not self._is_done_within(self._look_seconds if timeout < 0 else timeout):
            if timeout >= 0:
                return False
            by_rank.look_if_long(begun)
        if self._fault is not None:
            raise Fault(*self._fault)
        return True

    def _is_done_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._done, seconds)

    def poll(self) -> bool:
        return self.done()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn()
