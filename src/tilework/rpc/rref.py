"""References to values that other ranks hold."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from tilework.rpc.options import UNSET_RPC_TIMEOUT, Timeout
from tilework.rpc.workers import WorkerInfo

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value that one rank, its owner, holds; any rank may have one."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        raise NotImplementedError

    def owner(self) -> WorkerInfo:
        """The worker that holds the value."""
        raise NotImplementedError

    def owner_name(self) -> str:
        """The name of the worker that holds the value."""
        raise NotImplementedError

    def is_owner(self) -> bool:
        """Whether this rank holds the value."""
        raise NotImplementedError

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to know of this reference."""
        raise NotImplementedError

    def to_here(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the value; on the owner, the value itself. Blocks."""
        raise NotImplementedError

    def local_value(self) -> T:
        """The value itself, on its owner. Blocks until it is there."""
        raise NotImplementedError

    def rpc_sync(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_sync().method(...)`` calls a method of the value where it is."""
        raise NotImplementedError

    def rpc_async(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)``: the same, as a future."""
        raise NotImplementedError

    def remote(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.remote().method(...)``: the same, as a reference to the result."""
        raise NotImplementedError
