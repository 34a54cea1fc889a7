"""The interface of a rank's RPC engine for references and the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tilework.rpc.futures import RpcFuture
from tilework.rpc.gathering import Gatherings
from tilework.rpc.options import Timeout
from tilework.rpc.references import References
from tilework.rpc.workers import Directory, To


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
