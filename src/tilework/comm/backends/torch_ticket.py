"""torch's Work as a native engine's ticket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from tilework.comm.backends.ordered import Errand, FaultArgs


class _Owner(Protocol):
    def blocking(self, act: Callable[[], object]) -> None: ...
    def outcome(self, act: Callable[[], object]) -> FaultArgs | None: ...


class TorchTicket(Errand):
    """A message under way.

    torch's own waits for a message cannot be tried for a moment: one that gives up closes all
    connections. So the wait is one call, on the thread of whoever waits without a limit, or on
    one of its own where somebody only looks.
    """

    def __init__(self, owner: _Owner, work: Any, memory: object, timeout: float) -> None:
        super().__init__()
        self._owner = owner
        self._work = work
        #: Kept while the engine may touch it.
        self._memory = memory
        self._limit = timedelta(seconds=timeout)
        self._started = threading.Lock()

    def _finish(self) -> None:
        def wait() -> None:
            self._work.wait(self._limit)
            self.found_source = int(self._work._source_rank()) if self._is_receive() else -1

        fault = self._owner.outcome(lambda: self._owner.blocking(wait))
        self.complete(fault)

    def _is_receive(self) -> bool:
        try:
            return int(self._work._source_rank()) >= 0
        except RuntimeError:
            return False

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
