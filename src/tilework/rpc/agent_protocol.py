"""The interface of a rank's RPC engine, and the engine that the calling rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tilework.comm.world import current_world
from tilework.rpc.futures import Gatherings, RpcFuture
from tilework.rpc.references import References
from tilework.rpc.workers import Directory, Timeout, To
from tilework.store import Store


class AgentProtocol(Protocol):
    """The RPC engine of a rank; :class:`~tilework.rpc.agent.Agent` implements it."""

    rank: int
    rpc_timeout: float
    workers: Directory
    references: References
    gatherings: Gatherings

    def call(
        self,
        to: To,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: Timeout,
    ) -> Any: ...

    def call_async(
        self,
        to: To,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: Timeout,
    ) -> RpcFuture[Any]: ...

    def remote(
        self,
        to: To,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: Timeout,
    ) -> Any:
        """Call ``fn`` on worker ``to``, which keeps the result; return an RRef to it at once."""
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
    """The calling rank's agent.

    Raises:
        RuntimeError: The rank has not called init_rpc, or has called shutdown since.
    """
    agent = current_state().agent
    if agent is None:
        raise RuntimeError("RPC has not been initialized. Call rpc.init_rpc first.")
    return agent
