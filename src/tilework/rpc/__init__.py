"""Calling functions on other ranks, and references to what they hold.

    from tilework import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()

The names are torch.distributed.rpc's. A name, a rank or a WorkerInfo stands for a worker.
See docs/how-to/rpc.md.
"""

from typing import TYPE_CHECKING, NoReturn

from tilework.from_torch import refuse_left_out
from tilework.rpc import functions
from tilework.rpc.api import (
    all_gather,
    barrier,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_initialized,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from tilework.rpc.rref import RRef
from tilework.rpc.workers import UNSET_RPC_TIMEOUT, RpcBackendOptions, WorkerInfo

TensorPipeRpcBackendOptions = RpcBackendOptions
is_current_rpc_agent_set = is_initialized

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "all_gather",
    "barrier",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_current_rpc_agent_set",
    "is_initialized",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


if not TYPE_CHECKING:  # which would take any name for one that is here

    def __getattr__(name: str) -> NoReturn:
        """Raise the error for ``name``, which this package lacks."""
        refuse_left_out(__name__, name)
