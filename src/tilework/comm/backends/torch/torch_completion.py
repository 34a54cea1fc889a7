"""torch's Work as a native engine's completion."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import FaultArgs

#: Runs a call into an engine, and returns its fault.
Run = Callable[[Callable[[], object]], FaultArgs | None]


class TorchCompletion(PythonCompletion):
    """The completion of a message or collective that a backend of torch runs.

    torch cannot wait for a message for a moment only: a wait that times out closes all connections.
    So the wait is one call. It runs on the thread of a caller that waits without a limit, or on a
    separate thread if callers only poll.

    Args:
        work: torch's Work.
        memory: Kept alive while the engine may use it.
        timeout: How long the message may take, in seconds from the first wait.
        run: Runs the wait.
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

    def poll(self) -> bool:
        return self.done()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._watch()
        super().add_done_callback(fn)
