"""Failures of ranks, reported to each other through the store."""

from __future__ import annotations

from tilework.comm.backends.engine_protocol import Abort, FaultKind
from tilework.comm.backends.python_engine import poll
from tilework.errors import DistError
from tilework.store import Store

#: Seconds that a failing rank waits for the others' reports.
_ASK_SECONDS = 0.3
#: The same after connections closed: the rank that closed them may still collect reports.
_LOST_SECONDS = 0.7


class FailureLog:
    """Writes a rank's failures to the group's store, and reads those of other ranks. If the store
    fails, methods write and find nothing, and do not raise.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def report_failure(self, text: str) -> None:
        """Publish ``text``, the reason of this rank's failure, to the other ranks."""
        self._set(f"failures/{self._rank}", text)

    def failure_reports(self, timeout: float) -> list[str | None]:
        """The text that each rank has passed to :meth:`report_failure`; None for ranks that have
        passed none within ``timeout`` seconds.
        """
        keys = [f"failures/{rank}" for rank in range(self._size)]
        poll(lambda: self._check(*keys), timeout)
        return [self._get(key) for key in keys]

    def record_abort(self, kind: str, text: str) -> None:
        """Write that this rank aborts the group, and why; do nothing if another rank has written so
        before.
        """
        try:
            self._store.compare_set("abort", "", f"{self._rank} {kind} {text}")
        except DistError:
            return

    def aborted(self) -> Abort | None:
        """The first abort of the group that a rank has recorded; None if there was none."""
        record = self._get("abort") if self._check("abort") else None
        if record is None:
            return None
        rank, kind, text = record.split(" ", 2)
        return int(rank), kind, text

    def diagnose(self, late: bool) -> tuple[FaultKind, tuple[int, ...]]:
        """Report this rank's failure to the other ranks, wait briefly for them, and find the kind
        of fault and the ranks at fault.

        If a rank has aborted the group, the kind is "aborted". Otherwise the ranks at fault are
        those that have not reported a failure, too.

        Args:
            late: True if this rank waited too long; False if it lost connections.
        """
        self._set(f"failed/{self._rank}", "1")
        keys = {f"failed/{rank}": rank for rank in range(self._size)}
        poll(
            lambda: self._check("abort") or (late and self._check(*keys)),
            _ASK_SECONDS if late else _LOST_SECONDS,
        )
        if self._check("abort"):
            return "aborted", ()
        silent = tuple(rank for key, rank in keys.items() if not self._check(key))
        return ("timeout" if late else "peer_lost"), silent

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except DistError:
            return

    def _check(self, *keys: str) -> bool:
        try:
            return self._store.check(keys)
        except DistError:
            return False

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._check(key) else None
        except DistError:
            return None
