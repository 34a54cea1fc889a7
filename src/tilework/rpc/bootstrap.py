"""Starting a rank's agent: the ranks find each other through a store, and agree."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from tilework.comm.backends.internal import DistributedBackendOptions
from tilework.comm.backends.machine import host_identity, reachable_address
from tilework.comm.world import current_world
from tilework.rendezvous import rendezvous
from tilework.rpc.agent import Agent
from tilework.rpc.keys import agree_on_keys
from tilework.rpc.memory import SharedBufferPool
from tilework.rpc.options import RpcBackendOptions
from tilework.rpc.peer_discovery import Card, Meeting
from tilework.rpc.state import RpcState
from tilework.rpc.transport import Transport
from tilework.rpc.workers import Directory, check_name
from tilework.store import Store

#: The longest that a rank waits for the others to call init_rpc.
_LONGEST_SECONDS = 7 * 24 * 3600.0


def find_store(
    options: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[Store, int, int, bool]:
    """(the store where ranks meet, this rank, the number of ranks, True if the store is new).

    A ``rank`` of -1 and a ``world_size`` of None are taken from the default group, the URL or the
    environment. A new store was opened only for RPC, and the caller must close it.
    """
    size = -1 if world_size is None else world_size
    world = current_world()
    if options.init_method is None and world.default_group is not None:
        group = world.record(world.default_group)
        rank = group.group.rank() if rank == -1 else rank
        size = group.group.size() if size == -1 else size
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got {rank} of {size}")
        return group.store, rank, size, False
    url = options.init_method or "env://"
    limit = timedelta(seconds=min(options.rpc_timeout, _LONGEST_SECONDS))
    return *next(rendezvous(url, rank, size, timeout=limit)), True


def join(
    state: RpcState, store: Store, rank: int, size: int, name: str, options: RpcBackendOptions
) -> None:
    """Meet all other ranks at ``store``, and set ``state.agent`` to an agent that knows them.

    Collective; blocks until all ranks have come.
    """
    with contextlib.ExitStack() as undo:
        with Meeting(store, rank, size, min(options.rpc_timeout, _LONGEST_SECONDS)) as meeting:
            check_name(name)
            meeting.agree_on_size()
            if not store.authenticated:
                meeting.wait_for_all()  # so that each is told why there are no keys
            transport = Transport(rank, size, keys := agree_on_keys(meeting.store, size))
            undo.callback(transport.close, 0.0)
            shared_buffers = SharedBufferPool()
            undo.callback(shared_buffers.close)
            host = _host(meeting.store, rank, size)
            card = Card(name, keys.proof, host, transport.listen_here(), shared_buffers.probe)
            cards = meeting.exchange(card)
            workers = Directory([each.name for each in cards])
            addresses = _addresses(meeting, transport, store, cards, host)
        undo.pop_all()
    agent = Agent(
        rank,
        workers,
        transport,
        shared_buffers,
        [card.probe for card in cards],
        options.rpc_timeout,
        options.num_worker_threads,
    )
    state.agent = agent
    agent.start(addresses)


def _host(store: Store, rank: int, size: int) -> str:
    ranks = tuple(range(size))
    request = DistributedBackendOptions(store, rank, size, store.timeout, "rpc", ranks)
    return host_identity(request)


def _addresses(
    meeting: Meeting, transport: Transport, store: Store, cards: list[Card], host: str
) -> list[str]:
    """The address at which this rank reaches each rank, in the order of ranks. Collective."""
    if len({card.host for card in cards}) == 1:
        return [card.address for card in cards]
    meeting.publish("tcp", transport.listen_on(reachable_address(store)))
    far = meeting.gather("tcp")
    return [
        card.address if card.host == host else address
        for card, address in zip(cards, far, strict=True)
    ]
