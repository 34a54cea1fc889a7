"""Queues of values, by key, and who waits for them: without locks or sockets, as a Table is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from tilework.errors import DistStoreError
from tilework.store.checks import MAX_VALUE_BYTES, show_key

#: Takes a value that was pushed. Must be quick and must not raise.
Taker = Callable[[bytes], None]

#: The most bytes that one queue holds: nobody is to fill the memory of the store's server.
MAX_QUEUE_BYTES: Final = 16 * MAX_VALUE_BYTES


class Queues:
    """First-in, first-out queues by key; a value goes to the taker that has waited longest."""

    def __init__(self) -> None:
        self._values: dict[bytes, deque[bytes]] = {}
        self._sizes: dict[bytes, int] = {}
        # Nobody waits where there are values. Dicts keep the order of arrival.
        self._takers: dict[bytes, dict[Taker, None]] = {}

    def push(self, key: bytes, value: bytes) -> None:
        """Hand ``value`` to the taker that has waited longest; keep it if no taker waits.

        Raises:
            DistStoreError: The queue would hold more than MAX_QUEUE_BYTES.
        """
        takers = self._takers.get(key)
        if takers:
            taker = next(iter(takers))
            self.unpark(key, taker)
            taker(value)
            return
        self.check_push(key, value)
        self._values.setdefault(key, deque()).append(value)
        self._sizes[key] = self._sizes.get(key, 0) + len(value)

    def check_push(self, key: bytes, value: bytes) -> None:
        """Raise DistStoreError if the queue has no room for ``value``."""
        total = self._sizes.get(key, 0) + len(value)
        if total > MAX_QUEUE_BYTES:
            raise DistStoreError(
                f"queue_push would take the queue {show_key(key)} to {total} bytes; it takes at "
                f"most {MAX_QUEUE_BYTES}: pop some first"
            )

    def pop(self, key: bytes) -> bytes | None:
        """Take the oldest value out of the queue ``key``; None if the queue is empty."""
        values = self._values.get(key)
        if not values:
            return None
        value = values.popleft()
        self._sizes[key] -= len(value)
        if not values:
            del self._values[key], self._sizes[key]
        return value

    def first(self, key: bytes) -> list[bytes]:
        """A list of the oldest value, which stays in the queue; an empty list if there is none."""
        values = self._values.get(key)
        return [values[0]] if values else []

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
