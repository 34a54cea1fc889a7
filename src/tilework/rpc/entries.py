"""A rank's entry for a value that ranks refer to: the value, or a note that another rank has it."""

from __future__ import annotations

from typing import Any

from tilework.rpc.futures import RpcFuture
from tilework.rpc.message import RefId


class Owned:
    """The entry on the rank that owns the value: the value, once it exists.

    The entry lives as long as this rank has an RRef to the value, or another rank holds a
    reference.
    """

    __slots__ = ("__weakref__", "_error", "_value", "holders", "id", "owner", "pending")

    def __init__(self, id: RefId, owner: int) -> None:
        self.id, self.owner = id, owner
        #: By rank: the number of references that it was given and has not dropped.
        self.holders: dict[int, int] = {}
        #: Completes, with None, when the value is there; None once it is.
        self.pending: RpcFuture[None] | None = RpcFuture()
        # Not in the future, into which Python's garbage collector cannot look.
        self._value: Any = None
        self._error: BaseException | None = None

    def complete(self, value: Any) -> None:
        """Set the value, and wake all who wait for it."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """Set the error that :meth:`get` raises, since there will be no value."""
        self._error = error
        self._end()

    def _end(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.set_result(None)

    def get(self) -> Any:
        """The value. Blocks until the call that makes it has ended, and raises the call's error."""
        pending = self.pending
        if pending is not None:
            pending.wait()
        if self._error is not None:
            raise self._error
        return self._value


class HeldReference:
    """The entry on a rank that holds references to a value which another rank owns.

    The entry lives as long as this rank holds a reference.
    """

    __slots__ = ("__weakref__", "confirmed", "error", "id", "owner")

    def __init__(self, id: RefId, owner: int) -> None:
        self.id, self.owner = id, owner
        #: True if the owner is known to have counted this rank.
        self.confirmed = False
        #: Why there is no value, if so.
        self.error: BaseException | None = None


Entry = Owned | HeldReference
