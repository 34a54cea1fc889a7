"""A store whose waits end when they have become futile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from tilework.errors import StoreTimeoutError
from tilework.store import PrefixStore, Store

#: Seconds between looks whether waiting is futile.
_LOOK_SECONDS = 0.05


class WatchedStore(PrefixStore):
    """``store`` under a prefix; while it waits for keys, ``check`` is asked, which may raise."""

    def __init__(self, prefix: str, store: Store, check: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._check = check

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            try:
                return super().wait(keys, timedelta(seconds=max(0.0, min(left, _LOOK_SECONDS))))
            except StoreTimeoutError:
                if left <= _LOOK_SECONDS:
                    raise
            self._check()

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        self.wait([key], timeout)
        return super().get(key, timeout)

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        self.wait(keys, timeout)
        return super().multi_get(keys, timeout)
