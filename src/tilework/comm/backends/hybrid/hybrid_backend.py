"""The ``hybrid`` backend: shared memory within each host, torch's Gloo or MPI between hosts.

Every collective begins with a meeting: the ranks of each host gather their headers in shared
memory, the first rank of each host exchanges them with the other hosts over a socket, and all
compare them. Data moves only then (:mod:`.host_steps`), so differing sizes, which Gloo cannot
survive, never reach Gloo. Deaths and aborts come over the control channel
(:mod:`~tilework.comm.backends.control_channel`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from tilework.comm.backend import Backend, DistributedBackendOptions
from tilework.comm.backends.hybrid.hosts import share_memory
from tilework.comm.backends.hybrid.hybrid_engine import HybridEngine
from tilework.comm.backends.hybrid.meeting_engine import connect_hosts
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.rounding import HybridOptions
from tilework.comm.backends.torch.movers import GlooMover, Mover
from tilework.comm.backends.torch.torch_engines import check_available, make_gloo_backend
from tilework.comm.capabilities import Capability
from tilework.errors import DistBackendError, DistError
from tilework.store import PrefixStore

#: The library that moves tensors between hosts: "gloo" or "mpi", the same on all ranks.
LINK_VARIABLE: Final = "TILEWORK_LINK"


class HybridGroup(NativeGroup):
    """A process group of the backend ``hybrid``, with ranks on several hosts."""

    authenticated = False
    lacks: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.RANK_ORDER, Capability.WIDE_SUMS}
    )

    def __init__(self, engine: HybridEngine, request: DistributedBackendOptions) -> None:
        super().__init__(engine, request.group_rank, request.group_size, request.timeout)
        self.authenticated = request.store.authenticated


def create_hybrid_group(request: DistributedBackendOptions, options: Any) -> NativeGroup:
    """Make this rank's end of a group, a plain group if all share memory. Collective; blocks."""
    name, rounding = _link_name(), _agreed(request, options).rounding()
    hosts, shared = share_memory(request)
    if len(hosts.ranks) == 1:
        shared.engine.name = HybridEngine.name
        return shared
    with contextlib.ExitStack() as undo:
        undo.callback(shared.close)
        make_link = partial(_LINKS[name], request)
        connections = connect_hosts(request, hosts, shared.engine, make_link)
        undo.pop_all()
    if shared.registers is not None:
        shared.registers.leave(shared.rank())  # one host's registers; this group's is in the store
    return HybridGroup(HybridEngine(connections, rounding), request)


def _agreed(request: DistributedBackendOptions, options: Any) -> HybridOptions:
    """This rank's options. Raises DistBackendError unless the ranks have the same."""
    mine = options if isinstance(options, HybridOptions) else HybridOptions()
    theirs = request.store.compare_set("options", "", repr(mine)).decode()
    if theirs != repr(mine):
        rank = request.global_ranks_in_group[request.group_rank]
        raise DistBackendError(
            f"the ranks differ in pg_options: rank {rank} has {mine}, the first rank that came "
            f"{theirs}; give all ranks the same"
        )
    return mine


def _connect_gloo(request: DistributedBackendOptions, address: str) -> Mover:
    try:
        backend = make_gloo_backend(
            replace(request, store=PrefixStore("link", request.store)), address
        )
    except DistError:
        raise
    except RuntimeError as error:
        raise DistBackendError(
            f"gloo could not connect the hosts of group {request.group_id!r}: {error}"
        ) from error
    return GlooMover(backend, request, Backend.GLOO)


def _connect_mpi(request: DistributedBackendOptions, address: str) -> Mover:
    from tilework.comm.backends.mpi import MpiLink, connect

    return Mover(MpiLink(connect(request), request.timeout), request, Backend.MPI)


_LINKS: Final[dict[str, Callable[[DistributedBackendOptions, str], Mover]]] = {
    Backend.GLOO: _connect_gloo,
    Backend.MPI: _connect_mpi,
}


def _link_name() -> str:
    """The backend between hosts: ``TILEWORK_LINK`` or Gloo; raises if it is not available."""
    name = os.environ.get(LINK_VARIABLE, Backend.GLOO).lower()
    if name not in _LINKS:
        raise ValueError(f"{LINK_VARIABLE} must be one of {', '.join(_LINKS)}, got {name!r}")
    check_available(name)
    return name
