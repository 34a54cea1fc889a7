"""What programs call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tilework.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, Timeout
from tilework.rpc.rref import RRef
from tilework.rpc.workers import To, WorkerInfo

T = TypeVar("T")


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the workers as ``name``. Collective; blocks until all came."""
    raise NotImplementedError


def shutdown(graceful: bool = True, timeout: Timeout = 0) -> None:
    """Leave; with ``graceful``, once the work of all workers is done (then collective)."""
    raise NotImplementedError


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> T:
    """Call ``func`` on worker ``to`` and return what it returned. Blocks."""
    raise NotImplementedError


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[T]:
    """Call ``func`` on worker ``to``; a future of what it returns."""
    raise NotImplementedError


def remote(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Call ``func`` on worker ``to``, which keeps the result; a reference to that."""
    raise NotImplementedError


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker called so; this one for None."""
    raise NotImplementedError


def get_worker_infos() -> list[WorkerInfo]:
    """All workers, in the order of their ranks."""
    raise NotImplementedError


def is_initialized() -> bool:
    """Whether this rank has called init_rpc, and not shutdown since."""
    return False


def get_rpc_timeout() -> float:
    """How many seconds a call may take unless it says so itself; infinite for no limit."""
    raise NotImplementedError


def all_gather(
    obj: T, worker_names: Collection[str] | None = None, timeout: Timeout = UNSET_RPC_TIMEOUT
) -> dict[str, T]:
    """Every worker's ``obj``, by its name. Collective over the workers; blocks."""
    raise NotImplementedError


def barrier(
    worker_names: Collection[str] | None = None, timeout: Timeout = UNSET_RPC_TIMEOUT
) -> None:
    """Wait for the workers. Collective over them."""
    raise NotImplementedError
