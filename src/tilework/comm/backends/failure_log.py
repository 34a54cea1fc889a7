"""What ranks tell each other through the store when something went wrong."""

from __future__ import annotations

from tilework.comm.backends.engine_protocol import FaultKind
from tilework.comm.backends.ordered import until
from tilework.errors import DistError
from tilework.store import Store

#: How long a rank that fails waits for the others to say what they know.
_ASK_SECONDS = 0.3
#: The same where connections closed: their owner may still be asking.
_LOST_SECONDS = 0.7


class FailureLog:
    """The side of one rank. Without the store nothing is said, and nothing fails."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def say(self, text: str) -> None:
        """Leave last words."""
        self._set(f"words/{self._rank}", text)

    def heard(self, timeout: float) -> list[str | None]:
        """Every rank's last words, after waiting up to ``timeout`` seconds for all of them."""
        keys = [f"words/{rank}" for rank in range(self._size)]
        until(lambda: self._check(*keys), timeout)
        return [self._get(key) for key in keys]

    def tell_abort(self, kind: str, text: str) -> None:
        """Say that this rank aborts the group, unless another did before."""
        try:
            self._store.compare_set("abort", "", f"{self._rank} {kind} {text}")
        except DistError:
            return

    def abortion(self) -> tuple[int, str, str] | None:
        """(rank, kind, text) of the group's abort; None if there was none."""
        told = self._get("abort") if self._check("abort") else None
        if told is None:
            return None
        rank, kind, text = told.split(" ", 2)
        return int(rank), kind, text

    def ask(self, late: bool) -> tuple[FaultKind, tuple[int, ...]]:
        """Why this rank failed: the kind of fault, and the ranks that say nothing.

        Args:
            late: Whether this rank waited too long, rather than lost its connections.
        """
        self._set(f"failed/{self._rank}", "1")
        keys = {f"failed/{rank}": rank for rank in range(self._size)}
        until(
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
