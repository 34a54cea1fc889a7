"""A view of a store in which every key has a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tilework.store import checks
from tilework.store.arrivals import Arrivals
from tilework.store.contract import Data, Store


def _beneath(name: str) -> Any:
    """The property of that name of the store beneath."""
    return property(lambda self: getattr(self._store, name))


class PrefixStore(Store):
    """A view of ``store`` that puts ``prefix`` and a slash before every key.

    Several groups can share a store in this way without collisions of keys. The view has a
    separate time-out, at first that of the store. Closing the view leaves the store open.
    ``num_keys`` counts all keys of the store. Error messages name the keys with their prefix.

    Example:
        >>> from tilework.store import HashStore
        >>> store = HashStore()
        >>> PrefixStore("group_1", store).set("k", "v")
        >>> store.get("group_1/k")
        b'v'
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(
                f"PrefixStore(prefix, store) needs a tilework store, got {type(store).__name__}; "
                "wrap a torch store in TorchStoreAdapter"
            )
        super().__init__(store.timeout)
        checks.key_bytes(prefix)
        #: The beginning of every key, the slash aside.
        self.prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that this is a view of."""
        return self._store

    def set(self, key: str, value: Data) -> None:
        self._open_store().set(self._full(key), value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Data]) -> None:
        self._open_store().multi_set(self._full_all(keys), values)

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        return self._open_store().get(self._full(key), self._own(timeout))

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        return self._open_store().multi_get(self._full_all(keys), self._own(timeout))

    def add(self, key: str, amount: int) -> int:
        return self._open_store().add(self._full(key), amount)

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        return self._open_store().compare_set(self._full(key), expected, desired)

    def append(self, key: str, value: Data) -> None:
        self._open_store().append(self._full(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._open_store().check(self._full_all(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._open_store().wait(self._full_all(keys), self._own(timeout))

    def delete_key(self, key: str) -> bool:
        return self._open_store().delete_key(self._full(key))

    def list_keys(self) -> list[str]:
        """The keys of this view, without the prefix, in no order."""
        start = f"{self.prefix}/"
        keys = self._open_store().list_keys()
        return [key[len(start) :] for key in keys if key.startswith(start)]

    def queue_push(self, key: str, value: Data) -> None:
        self._open_store().queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        return self._open_store().queue_pop(self._full(key), block, self._own(timeout))

    def queue_len(self, key: str) -> int:
        return self._open_store().queue_len(self._full(key))

    def append_on_disconnect(
        self, key: str, value: Data, greeting: tuple[str, Data] | None = None
    ) -> Callable[[], None] | None:
        here = None if greeting is None else (self._full(greeting[0]), greeting[1])
        return self._open_store().append_on_disconnect(self._full(key), value, here)

    def arrivals(self) -> Arrivals | None:
        return self._open_store().arrivals()

    arrival_name, whole, why_gone = map(_beneath, ("arrival_name", "whole", "why_gone"))
    is_of_one_host, secret = _beneath("is_of_one_host"), _beneath("secret")
    authenticated = _beneath("authenticated")

    def num_keys(self) -> int:
        """The number of keys in the complete underlying store."""
        return self._open_store().num_keys()

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self._store!r})"

    def _own(self, timeout: timedelta | None) -> timedelta:
        return self._timeout if timeout is None else timeout

    def _full(self, key: str) -> str:
        checks.key_bytes(key)
        return f"{self.prefix}/{key}"

    def _full_all(self, keys: Sequence[str]) -> list[str]:
        checks.keys_bytes(keys)
        return [self._full(key) for key in keys]

    def _open_store(self) -> Store:
        if self._closed:
            raise checks.closed_error(repr(self))
        return self._store
