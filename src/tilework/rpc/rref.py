"""References to values that other ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tilework.comm.world import current_world
from tilework.rpc.functions import is_async
from tilework.rpc.futures import Gatherings, Later, RpcFuture
from tilework.rpc.references import Entry, Owned, References
from tilework.rpc.workers import UNSET_RPC_TIMEOUT, Directory, Timeout, To, WorkerInfo
from tilework.store import Store


class Request(NamedTuple):
    """A call of ``fn`` on worker ``to``."""

    to: To
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    timeout: Timeout


class AgentProtocol(Protocol):
    """The RPC engine of a rank; :class:`~tilework.rpc.agent.Agent` implements it."""

    rank: int
    rpc_timeout: float
    workers: Directory
    references: References
    gatherings: Gatherings

    def call(self, request: Request) -> Any: ...

    def call_async(self, request: Request) -> RpcFuture[Any]: ...

    def remote(self, request: Request) -> Any:
        """Call a function on a worker that keeps the result; return an RRef to it at once."""
        ...

    def gather(self, purpose: str, ranks: tuple[int, ...], obj: Any, timeout: Timeout) -> Any: ...
    def finish(self, timeout: Timeout) -> None: ...
    def close(self, linger_seconds: float = 0.0) -> None: ...


class RpcState:
    """This rank's agent, between init_rpc and shutdown. Closed together with the rank's groups."""

    def __init__(self) -> None:
        self.agent: AgentProtocol | None = None
        #: The store that the ranks met at, if it was opened for that.
        self.store: Store | None = None

    def close(self, linger_seconds: float = 0.0) -> None:
        """Leave RPC; messages that were sent have ``linger_seconds`` to leave. Idempotent."""
        agent, self.agent = self.agent, None
        store, self.store = self.store, None
        if agent is not None:
            agent.close(linger_seconds)
        if store is not None:
            store.close()


def current_state() -> RpcState:
    """The RPC state of the calling rank."""
    return current_world().state(RpcState)


def current_agent() -> AgentProtocol:
    """The calling rank's agent; a RuntimeError before init_rpc, and after shutdown."""
    agent = current_state().agent
    if agent is None:
        raise RuntimeError("RPC has not been initialized. Call rpc.init_rpc first.")
    return agent


T = TypeVar("T")


class RRef(Generic[T]):
    """A reference, on any rank, to a value that one rank holds: the owner.

    ``RRef(value)`` makes this rank the owner of ``value``. :func:`remote` runs a function on
    another rank and makes that rank the owner of the result. A reference can be an argument or a
    result of a call, alone or inside other objects: the rank that receives it can use it as well.
    The owner keeps the value as long as a living rank has a reference to it.

    Args:
        type_hint: Accepted for torch's sake; without effect.

    Raises:
        RuntimeError: init_rpc was not called.
    """

    __slots__ = ("__weakref__", "agent", "entry")
    agent: AgentProtocol
    """The agent that counts this RRef."""
    entry: Entry
    """The agent's entry for the value."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        self.agent = current_agent()
        self.entry = self.agent.references.own(value)

    @classmethod
    def of(cls, agent: AgentProtocol, entry: Entry) -> RRef[Any]:
        """An RRef to the value of ``entry``, which ``agent`` counts."""
        rref = cls.__new__(cls)
        rref.agent, rref.entry = agent, entry
        return rref

    def owner(self) -> WorkerInfo:
        """The worker that holds the value."""
        return self.agent.workers.find(self.entry.owner)

    def owner_name(self) -> str:
        """The name of the worker that holds the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """True if this rank holds the value."""
        return isinstance(self.entry, Owned)

    def confirmed_by_owner(self) -> bool:
        """True if the owner has confirmed this reference. Does not wait."""
        return isinstance(self.entry, Owned) or self.entry.confirmed

    def to_here(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the value; on the owner, the value itself. Blocks until the value exists.

        Raises:
            Exception: The error of the function that should have made the value, or an error of
                rpc_sync.
        """
        if isinstance(self.entry, Owned):
            return self.local_value()
        if self.entry.error is not None:
            raise self.entry.error
        value: T = self.agent.call(Request(self.entry.owner, _fetch, (self,), {}, timeout))
        return value

    def local_value(self) -> T:
        """The value itself, on the owner. Blocks until the value exists.

        Raises:
            RuntimeError: This rank is not the owner.
            Exception: The error of the function that should have made the value.
        """
        if not isinstance(self.entry, Owned):
            raise RuntimeError(
                f"the value of {self!r} is on {self.owner_name()!r}, not here: call local_value() "
                f"there, or to_here() for a copy"
            )
        value: T = self.entry.get()
        return value

    def rpc_sync(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_sync().method(...)`` calls a method of the value on the owner, and blocks."""
        return _Methods(self, self.agent.call, timeout)

    def rpc_async(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)`` calls a method on the owner, and returns a future."""
        return _Methods(self, self.agent.call_async, timeout)

    def remote(self, timeout: Timeout = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.remote().method(...)`` calls a method of the value on the owner.

        The result stays on the owner: returns an RRef to the result.
        """
        return _Methods(self, self.agent.remote, timeout)

    def __repr__(self) -> str:
        return f"RRef(owner={self.owner_name()!r}, id={tuple(self.entry.id)})"

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "an RRef can only be pickled as part of an RPC, which counts it; send it with "
            "rpc_sync, rpc_async or remote, or pickle its to_here()"
        )


class _Methods:
    """Stands for an RRef's value: each attribute calls the method of that name on the owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: Timeout) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, call, timeout = self._rref, self._call, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            told = (rref, name, args, kwargs)
            return call(Request(rref.entry.owner, _call_method, told, {}, timeout))

        return method


# -- what runs on the owner -----------------------------------------------------------------


def _fetch(rref: RRef[Any]) -> Any:
    entry = rref.entry
    assert isinstance(entry, Owned)
    return Later(entry.pending.then(lambda _: entry.get())) if entry.pending else entry.get()


def _call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = getattr(rref.local_value(), name)
    result = method(*args, **kwargs)
    return Later.of(method, result) if is_async(method) else result


def fill(rref: RRef[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``fn`` on the owner, for :func:`remote`; the result or error becomes that of ``rref``."""
    entry = rref.entry
    assert isinstance(entry, Owned)
    try:
        result = fn(*args, **kwargs)
        if isinstance(result, Later):
            result = result.future
        elif not is_async(fn):
            entry.complete(result)
            return
        result.add_done_callback(lambda done: _copy(done, entry))
    except BaseException as error:
        entry.fail(error)


def _copy(done: Any, entry: Owned) -> None:
    try:
        entry.complete(done.value())
    except BaseException as error:
        entry.fail(error)
