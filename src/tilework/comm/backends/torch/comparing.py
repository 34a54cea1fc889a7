"""Make the engine of a group whose ranks compare calls: connect the ranks, and agree how much."""

from __future__ import annotations

import contextlib
import os

from tilework.comm.backend import DistributedBackendOptions, core_error
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.hybrid.meeting_engine import connect_hosts
from tilework.comm.backends.torch.compared_engine import ALL, AMOUNTS, OFF, VARIABLE, ComparedEngine
from tilework.comm.backends.torch.movers import Mover
from tilework.comm.backends.torch.stream_engine import StreamEngine
from tilework.errors import DistBackendError

#: The format of headers; bumped with every change.
_FORMAT = 2


def compared(mover: Mover, request: DistributedBackendOptions) -> ComparedEngine:
    """The engine of a group whose data ``mover`` moves. Collective; blocks until all ranks came."""
    with contextlib.ExitStack() as undo:
        undo.callback(mover.release)
        amount = _agreed_amount(request)
        size, me = request.group_size, request.group_rank
        hosts, shared = Hosts(tuple((rank,) for rank in range(size)), me), None
        if size > 1 and amount != OFF and core_error() is None:
            from tilework.comm.backends.hybrid.hosts import share_memory

            hosts, group = share_memory(request)
            undo.callback(group.close)
            shared = group.engine
            if group.registers is not None:
                group.registers.leave(group.rank())
        connections = connect_hosts(request, hosts, shared, lambda address: mover)
        undo.pop_all()
    return (ComparedEngine if mover.blocks else StreamEngine)(amount, connections)


def _agreed_amount(request: DistributedBackendOptions) -> str:
    amount = os.environ.get(VARIABLE, ALL).lower()
    if amount not in AMOUNTS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(AMOUNTS)}, got {amount!r}")
    store, ranks = request.store, range(request.group_size)
    store.set(f"compare/{request.group_rank}", f"{amount}, headers of format {_FORMAT}")
    texts = [text.decode() for text in store.multi_get([f"compare/{rank}" for rank in ranks])]
    if len({*texts}) > 1:
        values = "; ".join(
            f"rank {rank} has {text}"
            for rank, text in zip(request.global_ranks_in_group, texts, strict=True)
        )
        raise DistBackendError(
            f"ranks of group {request.group_id!r} would compare different things: {values}. Give "
            f"{VARIABLE} the same value on all ranks, and install one version of tilework"
        )
    return amount
