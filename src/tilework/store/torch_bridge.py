"""Adapters between tilework's stores and torch's stores, both ways.

Not imported by :mod:`tilework.store` itself: stores work without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import torch._C._distributed_c10d as c10d  # torch.distributed hides these from type checkers.
import torch.distributed as torch_dist

from tilework.errors import DistNetworkError, DistStoreError
from tilework.store import checks
from tilework.store.contract import Data, Store
from tilework.store.table import Table

#: Pauses between looks at a torch store while waiting, in seconds: first and longest.
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.02


class TorchStoreAdapter(Store):
    """A store of torch.distributed, to be used as a tilework store.

    For a store that exists already, such as the store that torchrun serves. Closing the adapter
    leaves torch's store open: torch closes a store when the last reference to it goes.

    Args:
        store: Any ``torch.distributed.Store``.
        timeout: How long blocking methods wait; the store's own time-out unless given.
        authenticated: Whether only this job can reach torch's store, if the caller knows.

    Example:
        >>> import torch
        >>> store = TorchStoreAdapter(torch.distributed.HashStore())
        >>> store.set("k", "v")
        >>> store.get("k")
        b'v'
    """

    authenticated = False

    def __init__(
        self, store: c10d.Store, timeout: timedelta | None = None, authenticated: bool = False
    ) -> None:
        # Any: torch's stubs lack some methods of stores.
        self._store = cast(Any, store)
        super().__init__(self._store.timeout if timeout is None else timeout)
        self.authenticated = authenticated
        # FileStore has none of append, multi_get and multi_set.
        self._extended = bool(self._store.has_extended_api())

    @property
    def torch_store(self) -> c10d.Store:
        """The adapted store."""
        store: c10d.Store = self._store
        return store

    def set(self, key: str, value: Data) -> None:
        checks.key_bytes(key)
        self._call("set", key, checks.data_bytes(value))

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        self.wait([key], timeout)
        return bytes(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        name, number = checks.key_bytes(key), checks.amount_int(amount)
        if self.check([key]):
            # torch's server drops the connection over what is no integer, and wraps around.
            held = Table()
            held.set(name, bytes(self._call("get", key)))
            held.add(name, number)
        return int(self._call("add", key, number))

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        checks.key_bytes(key)
        old, new = checks.compare_set_bytes(expected, desired)
        return bytes(self._call("compare_set", key, _text(old), _text(new)))

    def append(self, key: str, value: Data) -> None:
        checks.key_bytes(key)
        data = checks.data_bytes(value)
        if self._extended:
            # An empty append creates no key in some of torch's stores.
            if data or not self.check([key]):
                self._call("append", key, _text(data))
            return
        held = b""
        while True:
            now = self.compare_set(key, held, held + data)
            if now == held + data:
                return
            held = now

    def check(self, keys: Sequence[str]) -> bool:
        checks.keys_bytes(keys)
        return not keys or bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._wait_seconds(timeout)
        deadline, pause = checks.Deadline(limit), _FIRST_PAUSE
        # Polled: torch's own wait would hold back this store's other threads, and Ctrl-C.
        while not self.check(keys):
            if deadline.passed:
                missing = [key for key in keys if not self.check([key])]
                raise checks.timeout_error(repr(self), keys, missing, limit)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        checks.key_bytes(key)
        existed = self.check([key])  # torch's FileStore says True in any case.
        return bool(self._call("delete_key", key)) and existed

    def num_keys(self) -> int:
        """The number of keys, torch's own bookkeeping included."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        """All keys, torch's own bookkeeping included, in no order."""
        return list(self._call("list_keys"))

    def queue_push(self, key: str, value: Data) -> None:
        """Append ``value`` to the queue ``key``; torch's FileStore has none."""
        checks.key_bytes(key)
        self._call("queue_push", key, checks.data_bytes(value))

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        checks.key_bytes(key)
        limit = self._wait_seconds(timeout)
        deadline, pause = checks.Deadline(limit), _FIRST_PAUSE
        while True:  # polled, as wait is
            late = deadline.passed
            if self.queue_len(key):
                try:
                    return bytes(self._call("queue_pop", key, False))
                except DistStoreError:  # another caller was first, or it failed
                    if self.queue_len(key):
                        raise
            if not block:
                raise checks.empty_error(repr(self), key)
            if late:
                raise checks.timeout_error(repr(self), [key], [key], limit)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def queue_len(self, key: str) -> int:
        checks.key_bytes(key)
        return int(self._call("queue_len", key))

    def __repr__(self) -> str:
        return f"TorchStoreAdapter({type(self._store).__name__})"

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._closed:
            raise checks.closed_error(repr(self))
        try:
            return getattr(self._store, method)(*arguments)
        except AttributeError as error:
            raise DistStoreError(f"{self!r} has no {method} in this version of torch") from error
        except torch_dist.DistNetworkError as error:
            raise DistNetworkError(f"{self!r}: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise DistStoreError(f"{self!r} cannot {method} {arguments[:1]!r}: {error}") from error


def _text(value: bytes) -> str:
    """The value as a str, for methods of torch's stores that take no bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"torch's stores take UTF-8 only in append and compare_set, got {value[:40]!r}"
        ) from error


def connect_to_torch(host: str, port: int, timeout: timedelta) -> c10d.Store:
    """A client of the ``torch.distributed.TCPStore`` that another process serves.

    Blocks until the server answers. Raises DistNetworkError if it does not within ``timeout``.
    """
    try:
        return c10d.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except torch_dist.DistNetworkError as error:
        # The first line: a C++ stack follows.
        raise DistNetworkError(str(error).splitlines()[0]) from error


def _handed_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._store, name)(*args, **kwargs)


class _StoreForTorch(c10d.Store):
    """A tilework store for torch's C++ code, which calls these methods by name."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Data) -> None:
        self._store.set(key, _bytes(value))

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        return self._store.compare_set(key, _bytes(expected), _bytes(desired))

    def append(self, key: str, value: Data) -> None:
        self._store.append(key, _bytes(value))

    def queue_push(self, key: str, value: Data) -> None:
        self._store.queue_push(key, _bytes(value))

    def multi_set(self, keys: list[str], values: list[Data]) -> None:
        self._store.multi_set(keys, [_bytes(value) for value in values])

    def has_extended_api(self) -> bool:
        return True

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def clone(self) -> c10d.Store:
        return self

    for _same in (
        *(Store.get, Store.multi_get, Store.add, Store.check, Store.wait, Store.set_timeout),
        *(Store.delete_key, Store.num_keys, Store.list_keys, Store.queue_pop, Store.queue_len),
    ):
        vars()[_same.__name__] = _handed_on(_same.__name__)
    # Python callers use the names above, C++ these.
    deleteKey = _handed_on("delete_key")
    getNumKeys = _handed_on("num_keys")


def _bytes(value: Any) -> bytes:
    """A value as torch's code hands it over: str, bytes or a list of small integers."""
    return value.encode() if isinstance(value, str) else bytes(value)


def as_torch_store(store: Store) -> c10d.Store:
    """``store`` as a ``torch.distributed.Store``, for torch's own process groups.

    Keep ``store`` for as long as a group uses the result. Errors of ``store`` reach the Python
    caller of torch's function; some of torch's groups wrap them in another RuntimeError. For a
    :class:`TorchStoreAdapter` the result is torch's own store, which the adapter holds. Use::

        group = torch.distributed.ProcessGroupGloo(as_torch_store(store), rank, size, timeout)
    """
    if isinstance(store, TorchStoreAdapter):
        return store.torch_store
    if not isinstance(store, Store):
        raise TypeError(f"as_torch_store needs a tilework store, got {type(store).__name__}")
    # C++ keeps only the C++ half of the object, and the next call fails without the other half
    # ("not implemented"). So the store keeps the Python half alive.
    view: c10d.Store = vars(store).setdefault("_seen_by_torch", _StoreForTorch(store))
    return view
