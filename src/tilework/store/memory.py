"""A store for the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from tilework.forks import watch_forks
from tilework.store import checks
from tilework.store.contract import DEFAULT_TIMEOUT, Data, Store
from tilework.store.late_notice import KeyWait
from tilework.store.table import Queues, Table

T = TypeVar("T")


class HashStore(Store):
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

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._queues = Queues()
        #: Wakes those who wait for a value of a queue when the store closes.
        self._closing: dict[threading.Event, None] = {}
        self._lock = threading.Lock()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Take a fresh lock: a thread that is not here may have held the old one."""
        self._lock = threading.Lock()

    def set(self, key: str, value: Data) -> None:
        """Store ``value`` under ``key``, replacing what was there."""
        name, data = checks.key_bytes(key), checks.data_bytes(value)
        self._locked(lambda table: table.set(name, data))

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Wait until ``key`` exists, then return the value."""
        name = checks.key_bytes(key)
        return self._when_present([name], timeout, lambda: self._table.values[name])

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at ``key``; see :meth:`Store.add`."""
        name, number = checks.key_bytes(key), checks.amount_int(amount)
        return self._locked(lambda table: table.add(name, number))

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        """Set ``key`` to ``desired`` if it holds ``expected``; see :meth:`Store.compare_set`."""
        name, (old, new) = checks.key_bytes(key), checks.compare_set_bytes(expected, desired)
        return self._locked(lambda table: table.compare_set(name, old, new))

    def append(self, key: str, value: Data) -> None:
        """Append to the value at ``key``, which is created if absent."""
        name, data = checks.key_bytes(key), checks.data_bytes(value)
        self._locked(lambda table: table.append(name, data))

    def check(self, keys: Sequence[str]) -> bool:
        """True if all ``keys`` exist, without waiting."""
        names = checks.keys_bytes(keys)
        return self._locked(lambda table: table.has(names))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist at once."""
        self._when_present(checks.keys_bytes(keys), timeout, lambda: None)

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """``get`` for several keys, all read at one moment."""
        names = checks.keys_bytes(keys)
        return self._when_present(names, timeout, lambda: [self._table.values[n] for n in names])

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it existed."""
        name = checks.key_bytes(key)
        return self._locked(lambda table: table.delete(name))

    def num_keys(self) -> int:
        """The number of keys."""
        return self._locked(lambda table: len(table.values))

    def list_keys(self) -> list[str]:
        """All keys, in no order."""
        return self._locked(lambda table: [key.decode() for key in table.values])

    def queue_push(self, key: str, value: Data) -> None:
        """Append ``value`` to the queue ``key``; see :meth:`Store.queue_push`."""
        name, data = checks.key_bytes(key), checks.data_bytes(value)
        self._locked(lambda _: self._queues.push(name, data))

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        """Take the oldest value of the queue ``key``; see :meth:`Store.queue_pop`."""
        name, limit = checks.key_bytes(key), self._wait_seconds(timeout)
        deadline, lines = checks.Deadline(limit), KeyWait(self, [name])
        arrived, taken = threading.Event(), list[bytes]()

        def take(value: bytes) -> None:
            taken.append(value)
            arrived.set()

        with self._lock:
            self._ensure_open()
            value = self._queues.pop(name)
            if value is not None:
                return value
            if not block:
                raise checks.empty_error("HashStore", key)
            self._queues.park(name, take)
            self._closing[arrived] = None
        try:
            while not arrived.wait(lines.pause(deadline.left())) and not deadline.passed:
                lines.look([name])
        finally:
            with self._lock:
                self._queues.unpark(name, take)
                self._closing.pop(arrived, None)
        if not taken:
            self._ensure_open()
            raise checks.timeout_error("HashStore", [key], [key], limit)
        return taken[0]

    def queue_len(self, key: str) -> int:
        """The number of values in the queue ``key``."""
        name = checks.key_bytes(key)
        return self._locked(lambda _: self._queues.length(name))

    def close(self) -> None:
        """Close the store for all threads that share it: waits and later calls raise."""
        with self._lock:
            self._closed = True
            self._table.wake_all()
            for waiting in self._closing:
                waiting.set()

    @property
    def authenticated(self) -> bool:
        """True: only this process can reach it."""
        return True

    @property
    def is_of_one_host(self) -> bool:
        """True: only this process can reach it."""
        return True

    def __repr__(self) -> str:
        return "HashStore()"

    def _locked(self, use: Callable[[Table], T]) -> T:
        with self._lock:
            self._ensure_open()
            return use(self._table)

    def _when_present(
        self, names: Sequence[bytes], timeout: timedelta | None, read: Callable[[], T]
    ) -> T:
        """The result of ``read()``, called under the lock when all ``names`` exist at once."""
        limit = self._wait_seconds(timeout)
        deadline, lines = checks.Deadline(limit), KeyWait(self)
        while True:
            arrived = threading.Event()
            with self._lock:
                self._ensure_open()
                waiter = self._table.park(names, arrived.set)
                if waiter is None:
                    return read()
            came = arrived.wait(lines.pause(deadline.left()))
            with self._lock:
                self._table.unpark(waiter)
                missing = self._table.missing(names)
            if not came and missing and not deadline.passed:
                lines.look(missing)
            elif not came and missing:
                shown, lacking = ([n.decode() for n in part] for part in (names, missing))
                raise checks.timeout_error("HashStore", shown, lacking, limit)

    def _ensure_open(self) -> None:
        if self._closed:
            raise checks.closed_error("HashStore")
