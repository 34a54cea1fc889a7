"""A store for the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from tilework.forks import watch_forks
from tilework.store import checks
from tilework.store.contract import DEFAULT_TIMEOUT
from tilework.store.late_notice import KeyWait
from tilework.store.requesting import RequestStore
from tilework.store.requests import LocalClient, StoreOperation, StoreState
from tilework.store.wire import Code, WireMessage

T = TypeVar("T")


class HashStore(RequestStore):
    """A dictionary that the threads of one process share.

    For ranks that are threads, and for tests. A forked child gets a copy that nobody
    else sees. ``close`` makes every waiting thread raise at once.

    Example:
        >>> import threading
        >>> store = HashStore()
        >>> threading.Thread(target=lambda: store.set("k", "v")).start()
        >>> store.get("k")
        b'v'
    """

    authenticated = is_of_one_host = True

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._state = StoreState()
        #: Those who wait.
        self._parked: dict[LocalClient, None] = {}
        self._lock = threading.Lock()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Take a fresh lock: a thread that is not here may have held the old one."""
        self._lock = threading.Lock()

    def _do(self, operation: StoreOperation[T], *args: bytes | int) -> T:
        with self._lock:
            if self._closed:
                raise checks.closed_error("HashStore")
            return operation.run(self._state, *args)

    def _batches(self, fields: list[bytes], together: int = 1) -> list[list[bytes]]:
        return [fields]

    def _send(
        self, code: Code, fields: Sequence[bytes], lines: KeyWait | None = None, left: float = 0.0
    ) -> WireMessage:
        with self._lock:
            self._ensure_open()
            client = LocalClient(self._state, code, fields)
            if client.answer is not None or lines is None:
                return client.end()
            self._parked[client] = None
        deadline = checks.Deadline(left)
        try:
            while not client.ended.wait(lines.pause(deadline.left())) and not deadline.passed:
                lines.look()
        finally:
            with self._lock:
                del self._parked[client]
                answer = client.end()
        if answer.code == Code.TIMEOUT:
            self._ensure_open()
        return answer

    def close(self) -> None:
        """Close the store for all threads that share it: waits and later calls raise."""
        with self._lock:
            self._closed = True
            for client in self._parked:
                client.ended.set()

    def __repr__(self) -> str:
        return "HashStore()"

    def _ensure_open(self) -> None:
        if self._closed:
            raise checks.closed_error("HashStore")
