"""A store whose waits end when they become futile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import TypeVar

from tilework.errors import StoreTimeoutError
from tilework.store import PrefixStore, Store
from tilework.store.internal import left_seconds

T = TypeVar("T")
#: Seconds between looks whether waiting is futile, from the first to the longest.
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 0.3


class WatchedStore(PrefixStore):
    """``store`` under a prefix, whose waits call ``check``, which may raise to end them."""

    def __init__(self, prefix: str, store: Store, check: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._check = check

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._retry(partial(super().wait, keys), timeout)

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        return self._retry(partial(super().get, key), timeout)

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        return self._retry(partial(super().multi_get, keys), timeout)

    def look(self) -> None:
        """Call ``check``, which raises if waiting for other ranks is futile."""
        self._check()

    def _retry(self, ask: Callable[[timedelta], T], timeout: timedelta | None) -> T:
        limit = left_seconds((self.timeout if timeout is None else timeout).total_seconds())
        deadline, look = time.monotonic() + limit, _FIRST_LOOK
        while True:
            left = deadline - time.monotonic()
            try:
                return ask(timedelta(seconds=max(0.0, min(left, look))))
            except StoreTimeoutError:
                if left <= look:
                    raise
            self._check()
            look = min(1.5 * look, _LONGEST_LOOK)


def while_looking(act: Callable[[], T], store: Store) -> T:
    """The result of ``act()``, run by another thread while this one calls :func:`look`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    context = copy_context()  # knows which rank this is
    name = "tilework-wait"
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    while True:
        try:
            return future.result(_LONGEST_LOOK)
        except FutureTimeoutError:
            if future.done():
                return future.result()
            look(store)


def look(store: Store) -> None:
    """Call the check of the :class:`WatchedStore` that ``store`` is or wraps, if any."""
    if isinstance(store, WatchedStore):
        store.look()
    elif isinstance(store, PrefixStore):
        look(store.underlying_store)
