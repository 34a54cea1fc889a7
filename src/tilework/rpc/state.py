"""RPC's part of a rank's World."""

from __future__ import annotations

from tilework.comm.world import current_world
from tilework.rpc.agent_protocol import AgentProtocol
from tilework.store import Store


class RpcState:
    """This rank's agent, between init_rpc and shutdown. Closed with the World."""

    def __init__(self) -> None:
        self.agent: AgentProtocol | None = None
        #: The store that the ranks met at, if it was opened for that.
        self.store: Store | None = None

    def close(self, linger_seconds: float = 0.0) -> None:
        """Leave. What was sent has so long to go. Idempotent."""
        agent, self.agent = self.agent, None
        store, self.store = self.store, None
        if agent is not None:
            agent.close(linger_seconds)
        if store is not None:
            store.close()


def current_state() -> RpcState:
    """The calling rank's state."""
    return current_world().state(RpcState)


def current_agent() -> AgentProtocol:
    """The calling rank's agent.

    Raises:
        RuntimeError: There is none.
    """
    agent = current_state().agent
    if agent is None:
        raise RuntimeError("RPC has not been initialized. Call rpc.init_rpc first.")
    return agent
