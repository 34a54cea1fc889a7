"""The part of a rank's World (all groups of the rank) that belongs to RPC."""

from __future__ import annotations

from tilework.comm.world import current_world
from tilework.rpc.agent_protocol import AgentProtocol
from tilework.store import Store


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
