"""The contract of a key-value store: how ranks find each other before they have a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from tilework.store import checks
from tilework.store.arrivals import Arrivals

DEFAULT_TIMEOUT: Final = timedelta(minutes=5)

#: A key or value; str is stored as UTF-8.
Data = str | bytes

AnyStore = TypeVar("AnyStore", bound="Store")


class Store(ABC):
    """A map from keys to bytes that all ranks share, with waiting reads and atomic updates.

    Values are ``bytes``; ``str`` arguments are stored as UTF-8. Every method may be called from
    any thread. None is collective. Blocking methods (``get``, ``wait``, ``multi_get``) raise
    :class:`~tilework.errors.StoreTimeoutError`, a :class:`~tilework.errors.DistStoreError`, when
    the timeout passes; the message starts with ``Timeout`` and names the keys and the seconds.
    A key takes up to 64 KiB and a value up to just under 64 MiB
    (:data:`~tilework.store.MAX_KEY_BYTES`, :data:`~tilework.store.MAX_VALUE_BYTES`); a longer one
    is a ValueError. A store is a context manager that closes itself.

    Example:
        >>> from tilework.store import HashStore
        >>> with HashStore() as store:
        ...     store.set("answer", "42")
        ...     store.add("answer", 1)
        43
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = checks.positive(timeout)
        self._closed = False

    @property
    def timeout(self) -> timedelta:
        """The time that blocking methods wait if the call gives no other time."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long blocking methods of this object wait from now on; must be positive."""
        self._timeout = checks.positive(timeout)

    @abstractmethod
    def set(self, key: str, value: Data) -> None:
        """Store ``value`` under ``key``, replacing what was there."""

    @abstractmethod
    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Wait until ``key`` exists, then return the value."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the integer (decimal text) at ``key``, 0 if absent; return the new value.

        Raises :class:`~tilework.errors.DistStoreError`, and changes nothing, if ``key`` holds no
        integer or the sum does not fit into 64 signed bits.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        """Set ``key`` to ``desired`` if it holds ``expected``; return what it holds afterwards.

        If ``key`` is absent, it is set if ``expected`` is empty; otherwise nothing changes, and
        ``expected`` is returned.
        """

    @abstractmethod
    def append(self, key: str, value: Data) -> None:
        """Append to the value at ``key``, which is created if absent."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """True if all ``keys`` exist, without waiting."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist at once. A timeout of zero looks once."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it existed."""

    @abstractmethod
    def num_keys(self) -> int:
        """The number of keys."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """All keys, in no order. The names of queues are not among them."""

    @abstractmethod
    def queue_push(self, key: str, value: Data) -> None:
        """Append ``value`` to the queue ``key``, which is made if absent. Never waits.

        Queues and keys are separate: a queue may have the same name as a key.

        Raises:
            DistStoreError: The queue has no room for more.
        """

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        """Take the oldest value of the queue ``key``; each value goes to one caller.

        Args:
            key: The queue's name.
            block: Whether to wait while the queue is empty. Stores that do not poll serve the
                callers that wait in the order in which they came.
            timeout: How long to wait; the store's own time unless given.

        Raises:
            QueueEmptyError: The queue is empty, and ``block`` is false.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """The number of values in the queue ``key``; 0 for one that nobody has pushed to."""

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """``get`` for several keys, in their order, under one timeout."""
        deadline = checks.Deadline(self._wait_seconds(timeout))
        self.wait(keys, timedelta(seconds=deadline.left()))
        # A key that is deleted in between is waited for again, under what is left of the time.
        return [self.get(key, timedelta(seconds=deadline.left())) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Data]) -> None:
        """``set`` for several keys, in their order; the lengths must agree."""
        checks.same_length(keys, values)
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Block until ``world_size`` callers have come with the same ``key``; use a key once.

        :func:`~tilework.store.store_based_barrier` can say who is missing.
        """
        if self.add(f"{key}/came", 1) >= world_size:
            self.set(f"{key}/all", b"")
        self.wait([f"{key}/all"], timeout)

    def clone(self: AnyStore) -> AnyStore:
        """The store itself: several threads may call methods of it at once."""
        return self

    def has_extended_api(self) -> bool:
        """True: every store has ``append``, ``multi_get``, ``multi_set`` and queues."""
        return True

    def append_on_disconnect(
        self, key: str, value: Data, greeting: tuple[str, Data] | None = None
    ) -> Callable[[], None] | None:
        """Have ``value`` appended to ``key`` when this process ends, or becomes another program.

        It does not matter how the process ends: this process keeps a separate connection open, and
        the server appends ``value`` when that connection closes. The returned function revokes
        this. The result is None, and ``value`` is never appended, where no server does this.

        Args:
            greeting: Another key, and a value that is appended to that key at once. Whoever reads
                it knows that the server has ``value`` as well, since one message carries both.
        """
        checks.key_bytes(key)
        checks.data_bytes(value)
        if greeting is not None:
            self.append(*greeting)
        return None

    def arrivals(self) -> Arrivals | None:
        """Counts of the stores made on this server or file; None where nobody counts them."""
        return None

    @property
    def arrival_name(self) -> str:
        """The name by which :meth:`arrivals` would list this store as lost; "" if not counted."""
        return ""

    @property
    def whole(self) -> Store:
        """The store that this is a view of; this store itself if it is no view."""
        return self

    @property
    def why_gone(self) -> str:
        """The reason if the server is known to be gone, else ""; does not ask the server."""
        return ""

    @property
    def is_of_one_host(self) -> bool:
        """True if only processes of this host can reach it; False if that is not known."""
        return False

    def close(self) -> None:
        """Release sockets, threads and files. Idempotent; other methods then raise."""
        self._closed = True

    @property
    def authenticated(self) -> bool:
        """True if only holders of the job's secret (or this process or user) can reach the store.

        False unless the class of the store overrides this. Values that can run code when they are
        decoded, such as pickled objects, are read from authenticated stores only.
        """
        return False

    @property
    def secret(self) -> bytes | None:
        """The secret that the holders of this store share and never send; None if there is none.

        Cryptographic keys may be derived from it, since it never crosses the network.
        """
        return None

    def __enter__(self: AnyStore) -> AnyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_seconds(self, timeout: timedelta | None) -> float:
        """Seconds that a blocking call waits: ``timeout``, or the store's own time if None."""
        return checks.seconds(self._timeout if timeout is None else timeout)
