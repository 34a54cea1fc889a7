"""A rank's entry for one reference: on the owner the value, elsewhere that it is held."""

from __future__ import annotations

from typing import Any

from tilework.rpc.futures import RpcFuture
from tilework.rpc.message import RefId


class Owned:
    """On the owner: the value, once it is there.

    It lives as long as an RRef of this rank, or the list of those that others hold, has it.
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
        """Set the value."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """Set the error that there is instead of a value."""
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
    """Elsewhere: that this rank has references to it. It lives as long as one of those."""

    __slots__ = ("__weakref__", "confirmed", "error", "id", "owner")

    def __init__(self, id: RefId, owner: int) -> None:
        self.id, self.owner = id, owner
        #: True if the owner is known to have counted this rank.
        self.confirmed = False
        #: Why there is no value, if so.
        self.error: BaseException | None = None


Entry = Owned | HeldReference
