"""A store in a file, for the processes of one host or of a shared file system."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from tilework.errors import DistStoreError
from tilework.store import checks
from tilework.store.arrivals import Arrivals
from tilework.store.contract import DEFAULT_TIMEOUT, Data, Store
from tilework.store.late_notice import KeyWait
from tilework.store.log import Log, LogRecord, RecordKind
from tilework.store.table import Table

T = TypeVar("T")

#: Pauses between looks at the file while waiting, in seconds: from the first to the longest.
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02


class FileStore(Store):
    """A store that any number of processes share through one file.

    The file is a log (see :mod:`tilework.store.log`): each change is one record, appended
    under a lock. Therefore ``set``, ``add``, ``compare_set``, ``append`` and ``delete_key`` are
    atomic across processes. A killed writer leaves at most an incomplete last record, which readers
    ignore and the next writer cuts off. If the disk is full, a change raises and changes nothing.
    The log only grows: it is meant for start-up, not for bulk data. A wait polls the file every 0.5
    to 20 ms.

    Keys that an earlier job left at ``path`` still exist: use a new path for each job.

    Args:
        path: The file; created (mode 0600) if missing, an empty one is fine.
        world_size: How many stores will be made on ``path``, over all processes. If positive, the
            file is removed when the last of them closes.
        timeout: How long blocking methods wait, and how long any change waits for the file's lock.

    Raises:
        DistStoreError: The file cannot be opened or written, is damaged, or is no store's file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with FileStore(f"{folder}/my-job") as a, FileStore(f"{folder}/my-job") as b:
        ...         a.set("k", "v")
        ...         b.get("k")
        b'v'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(timeout)
        if sys.platform == "win32":
            raise DistStoreError(
                f"FileStore needs a system with flock, this is {sys.platform}; use TCPStore "
                f"between processes, or HashStore between threads"
            )
        #: The file, as an absolute path.
        self.path = os.path.abspath(os.fspath(path))
        self._log = Log(self.path, world_size, checks.seconds(timeout))
        self._expected = world_size
        # Also when the store is dropped, and at exit: others count on the last one to clean up.
        self._finalizer = weakref.finalize(self, self._log.close)

    def set(self, key: str, value: Data) -> None:
        """Store ``value`` under ``key``, replacing what was there."""
        record = LogRecord(RecordKind.SET, checks.key_bytes(key), checks.data_bytes(value))
        self._change(lambda table: [record])

    def multi_set(self, keys: Sequence[str], values: Sequence[Data]) -> None:
        """``set`` for several keys, with one write."""
        checks.same_length(keys, values)
        pairs = zip(checks.keys_bytes(keys), map(checks.data_bytes, values), strict=True)
        records = [LogRecord(RecordKind.SET, key, value) for key, value in pairs]
        self._change(lambda table: records)

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Wait until ``key`` exists, then return the value."""
        name = checks.key_bytes(key)
        return self._when_present([name], timeout, lambda table: table.values[name])

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """``get`` for several keys, all read at one moment."""
        names = checks.keys_bytes(keys)
        return self._when_present(names, timeout, lambda table: [table.values[n] for n in names])

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at ``key``; see :meth:`Store.add`."""
        name, number = checks.key_bytes(key), checks.amount_int(amount)

        def changes(table: Table) -> list[LogRecord]:
            total = b"%d" % table.sum(name, number)
            # Polling with add(key, 0) must not make the file grow.
            return (
                [] if table.values.get(name) == total else [LogRecord(RecordKind.SET, name, total)]
            )

        return int(self._change(changes, lambda table: table.values[name]))

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        """Set ``key`` to ``desired`` if it holds ``expected``; see :meth:`Store.compare_set`."""
        name, (old, new) = checks.key_bytes(key), checks.compare_set_bytes(expected, desired)
        record = LogRecord(RecordKind.SET, name, new)
        return self._change(
            lambda table: [record] if table.would_set(name, old) else [],
            lambda table: table.values.get(name, old),
        )

    def append(self, key: str, value: Data) -> None:
        """Append to the value at ``key``, which is created if absent."""
        record = LogRecord(RecordKind.APPEND, checks.key_bytes(key), checks.data_bytes(value))

        def changes(table: Table) -> list[LogRecord]:
            table.check_append(record.key, record.value)
            return [record]

        self._change(changes)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all ``keys`` exist, without waiting."""
        names = checks.keys_bytes(keys)
        return self._look(lambda table: table.has(names))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist at once."""
        self._when_present(checks.keys_bytes(keys), timeout, lambda table: None)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it existed."""
        name, existed = checks.key_bytes(key), False

        def changes(table: Table) -> list[LogRecord]:
            nonlocal existed
            existed = name in table.values
            return [LogRecord(RecordKind.DELETE, name)] if existed else []

        self._change(changes)
        return existed

    def num_keys(self) -> int:
        """The number of keys."""
        return self._look(lambda table: len(table.values))

    def list_keys(self) -> list[str]:
        """All keys, in no order."""
        return self._look(lambda table: [key.decode() for key in table.values])

    def queue_push(self, key: str, value: Data) -> None:
        """Append ``value`` to the queue ``key``; see :meth:`Store.queue_push`."""
        record = LogRecord(RecordKind.PUSH, checks.key_bytes(key), checks.data_bytes(value))

        def changes(table: Table) -> list[LogRecord]:
            self._log.queues.check_push(record.key, record.value)
            return [record]

        self._change(changes)

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        """Take the oldest value of the queue ``key``; see :meth:`Store.queue_pop`."""
        name, limit = checks.key_bytes(key), self._wait_seconds(timeout)
        deadline, pause, lines = checks.Deadline(limit), _FIRST_PAUSE, KeyWait(self)
        taken: list[bytes] = []

        def changes(table: Table) -> list[LogRecord]:
            taken[:] = self._log.queues.first(name)
            return [LogRecord(RecordKind.POP, name)] if taken else []

        while True:
            late = deadline.passed
            if self._look(lambda table: self._log.queues.length(name)):
                self._change(changes)
            if taken:
                return taken[0]
            if not block:
                raise checks.empty_error(repr(self), key)
            if late:
                raise checks.timeout_error(repr(self), [key], [key], limit)
            lines.look([name])
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def queue_len(self, key: str) -> int:
        """The number of values in the queue ``key``."""
        name = checks.key_bytes(key)
        return self._look(lambda table: self._log.queues.length(name))

    def arrivals(self) -> Arrivals | None:
        """Counts of the stores made on this file; None where the system lacks the locks for it."""
        if self._log.number == 0:
            return None
        with self._log.mutex:
            self._ensure_open()
            self._log.refresh()
            lost = frozenset(map(str, self._log.lost()))
            return Arrivals(max(0, self._expected), self._log.opened, lost)

    @property
    def arrival_name(self) -> str:
        """This store's number among the stores made on the file; empty where nobody counts them."""
        return str(self._log.number or "")

    @property
    def is_of_one_host(self) -> bool:
        """True: the locks that show which processes have ended work on one host only."""
        return True

    def close(self) -> None:
        """Close the file; the last of ``world_size`` stores removes it. Idempotent."""
        self._finalizer()

    @property
    def authenticated(self) -> bool:
        """True if the file belongs to this user and nobody else may write to it."""
        with self._log.mutex:
            self._ensure_open()
            return self._log.private

    def __repr__(self) -> str:
        return str(self._log)

    def _change(
        self,
        changes: Callable[[Table], list[LogRecord]],
        result: Callable[[Table], bytes] = lambda table: b"",
    ) -> bytes:
        """Append the records that ``changes(table)`` returns; return ``result(table)``. Atomic."""
        with self._log.mutex:
            self._ensure_open()
            with self._log.writing(checks.seconds(self._timeout)) as table:
                records = changes(table)
                if records:
                    self._log.write(records)
                return result(table)

    def _look(self, read: Callable[[Table], T]) -> T:
        with self._log.mutex:
            self._ensure_open()
            self._log.refresh()
            return read(self._log.table)

    def _when_present(
        self, names: Sequence[bytes], timeout: timedelta | None, read: Callable[[Table], T]
    ) -> T:
        """The result of ``read(table)``, called when all ``names`` exist at once."""
        limit = self._wait_seconds(timeout)
        deadline, pause = checks.Deadline(limit), _FIRST_PAUSE
        lines = KeyWait(self)
        while True:
            late = deadline.passed
            with self._log.mutex:
                missing = self._look(lambda table: table.missing(names))
                if not missing:
                    return read(self._log.table)
            if late:
                shown, lacking = ([n.decode() for n in part] for part in (names, missing))
                raise checks.timeout_error(repr(self), shown, lacking, limit)
            lines.look(missing)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _ensure_open(self) -> None:
        if self._log.closed:
            raise checks.closed_error(repr(self))
