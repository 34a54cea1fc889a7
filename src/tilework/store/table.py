"""A store's contents and who waits for them, without locks or sockets.

:class:`HashStore`, :class:`FileStore` and the server behind :class:`TCPStore` hold one each, so
the meaning of every operation is written once (see :mod:`.requests`). Calls come from one thread at
a time: each owner sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tilework.errors import DistStoreError
from tilework.store.checks import MAX_INTEGER, MAX_VALUE_BYTES, show_key


class Waiter:
    """A callback that is to be called when several keys exist at once."""

    __slots__ = ("at", "keys", "ready")

    def __init__(self, keys: Sequence[bytes], ready: Callable[[], None]) -> None:
        self.keys = keys
        #: Called once, by the call that completed the keys. Must be quick and must not raise.
        self.ready = ready
        #: Index of the key that it is parked on; the keys before it have been seen.
        self.at = 0


class Table:
    """The keys and values of a store, and the callbacks that wait for keys."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        #: The number of changes so far.
        self.changes = 0
        # Each waiter is parked on one missing key at a time (dicts keep the order of arrival).
        self._parked: dict[bytes, dict[Waiter, None]] = {}

    def set(self, key: bytes, value: bytes) -> None:
        """Store ``value``, and wake those who waited for ``key``."""
        if self.values.get(key) != value:
            self.changes += 1
            self.values[key] = value
        for waiter in self._parked.pop(key, ()):
            if not self._seat(waiter):
                waiter.ready()

    def add(self, key: bytes, amount: int) -> int:
        """Add to the integer at ``key``; see :meth:`Store.add`."""
        current = self.values.get(key, b"0")
        try:
            total = int(current) + amount
        except ValueError:
            raise DistStoreError(
                f"add needs an integer at key {show_key(key)}, which holds {current[:40]!r}"
            ) from None
        if not -MAX_INTEGER - 1 <= total <= MAX_INTEGER:
            raise DistStoreError(
                f"add would take key {show_key(key)} to {total}, more than 64 signed bits hold"
            )
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set ``key`` if it holds ``expected``; see :meth:`Store.compare_set`."""
        if self.values.get(key, b"") == expected:
            self.set(key, desired)
        return self.values.get(key, expected)

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the value at ``key``. Raises DistStoreError if it would become too long."""
        total = len(self.values.get(key, b"")) + len(value)
        if total > MAX_VALUE_BYTES:
            raise DistStoreError(
                f"append would take key {show_key(key)} to {total} bytes; "
                f"a value takes at most {MAX_VALUE_BYTES}: use several keys"
            )
        self.set(key, self.values.get(key, b"") + value)

    def delete(self, key: bytes) -> bool:
        """Remove ``key``; return whether it existed."""
        existed = self.values.pop(key, None) is not None
        self.changes += existed
        return existed

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of ``keys`` that do not exist."""
        return [key for key in keys if key not in self.values]

    def has(self, keys: Iterable[bytes]) -> bool:
        """True if all ``keys`` exist."""
        return all(map(self.values.__contains__, keys))

    def park(self, keys: Sequence[bytes], ready: Callable[[], None]) -> Waiter | None:
        """Have ``ready`` called once all ``keys`` exist, and return the waiter.

        If all exist already, return None, and call nothing.
        """
        if self.has(keys):
            return None
        waiter = Waiter(keys, ready)
        self._seat(waiter)
        return waiter

    def unpark(self, waiter: Waiter) -> None:
        """Forget ``waiter``; harmless if it was woken already."""
        if waiter.at == len(waiter.keys):
            return
        key = waiter.keys[waiter.at]
        seats = self._parked.get(key, {})
        seats.pop(waiter, None)
        if not seats:
            self._parked.pop(key, None)

    def _seat(self, waiter: Waiter) -> bool:
        """Park ``waiter`` on the next missing key; False if nothing is missing."""
        keys, values = waiter.keys, self.values
        while waiter.at < len(keys) and keys[waiter.at] in values:
            waiter.at += 1
        if waiter.at == len(keys):
            # All were seen, but an early one may have been deleted since.
            waiter.at = next((i for i, key in enumerate(keys) if key not in values), len(keys))
        if waiter.at == len(keys):
            return False
        self._parked.setdefault(keys[waiter.at], {})[waiter] = None
        return True


#: Takes a value that was pushed. Must be quick and must not raise.
Taker = Callable[[bytes], None]

#: The most bytes that one queue holds: nobody is to fill the memory of the store's server.
MAX_QUEUE_BYTES: Final = 16 * MAX_VALUE_BYTES


class Queues:
    """First-in, first-out queues by key; a value goes to the taker that has waited longest."""

    def __init__(self) -> None:
        #: The number of changes so far.
        self.changes = 0
        self._values: dict[bytes, deque[bytes]] = {}
        self._sizes: dict[bytes, int] = {}
        # Nobody waits where there are values. Dicts keep the order of arrival.
        self._takers: dict[bytes, dict[Taker, None]] = {}

    def push(self, key: bytes, value: bytes) -> None:
        """Hand ``value`` to the taker that has waited longest; keep it if no taker waits.

        Raises DistStoreError if the queue would hold more than MAX_QUEUE_BYTES.
        """
        takers = self._takers.get(key)
        if takers:
            taker = next(iter(takers))
            self.unpark(key, taker)
            taker(value)
            return
        total = self._sizes.get(key, 0) + len(value)
        if total > MAX_QUEUE_BYTES:
            raise DistStoreError(
                f"queue_push would take the queue {show_key(key)} to {total} bytes; it takes at "
                f"most {MAX_QUEUE_BYTES}: pop some first"
            )
        self.changes += 1
        self._values.setdefault(key, deque()).append(value)
        self._sizes[key] = total

    def pop(self, key: bytes) -> bytes | None:
        """Take the oldest value out of the queue ``key``; None if the queue is empty."""
        values = self._values.get(key)
        if not values:
            return None
        self.changes += 1
        value = values.popleft()
        self._sizes[key] -= len(value)
        if not values:
            del self._values[key], self._sizes[key]
        return value

    def park(self, key: bytes, taker: Taker) -> None:
        """Have ``taker`` called with the next value that is pushed; the queue must be empty now."""
        self._takers.setdefault(key, {})[taker] = None

    def unpark(self, key: bytes, taker: Taker) -> None:
        """Forget ``taker``; harmless if the taker has a value already."""
        takers = self._takers.get(key, {})
        takers.pop(taker, None)
        if not takers:
            self._takers.pop(key, None)

    def length(self, key: bytes) -> int:
        """The number of values in the queue ``key``."""
        return len(self._values.get(key, ()))
