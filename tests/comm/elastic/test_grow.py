"""Ranks that were started again come back into the default group."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.elastic.grow import rejoin, tickets_waiting
from tilework.comm.elastic.ticket_store import Ticket, TicketStore
from tilework.comm.world import current_world
from tilework.rendezvous.liveness import process_identity
from tilework.store import HashStore
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)


def summed() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def run_with_newcomer(n: int, victim: int) -> list[object]:
    """``n`` ranks of which one ends, and a further thread that takes its seat."""
    store = HashStore()

    def program(rank: int) -> object:
        world = current_world()
        if rank == n:
            world.default_group = rejoin(world, store, victim, LIMIT, None)
            return dist.get_rank(), summed(), world.default_group.origins
        dist.init_process_group("threads", store=store, rank=rank, world_size=n, timeout=LIMIT)
        if rank == victim:
            return None
        with pytest.raises(dist.PeerLostError):
            dist.barrier()
        dist.shrink_group()
        while dist.get_world_size() < n:
            dist.grow_group()
        return dist.get_rank(), summed(), dist.get_default_group().origins

    return run_ranks(n + 1, program, init=False)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_newcomer_gets_the_seat_that_is_free(victim: int) -> None:
    results = run_with_newcomer(3, victim)
    origins = {0: (None, 0, 1), 2: (0, 1, None)}[victim]
    assert results.pop(victim) is None
    assert results.pop() == (victim, 3.0, origins)
    others = [rank for rank in range(3) if rank != victim]
    assert results == [(rank, 3.0, origins) for rank in others]


def test_nobody_waits() -> None:
    def program(rank: int) -> bool:
        group = dist.get_default_group()
        assert not tickets_waiting(group)
        return dist.grow_group() is group

    assert run_ranks(2, program) == [True, True]


def test_only_the_default_group_grows() -> None:
    def program(rank: int) -> None:
        some = dist.new_group([0, 1])
        with pytest.raises(ValueError, match="only the default group can grow"):
            dist.grow_group(some)
        with pytest.raises(ValueError, match="only the default group can grow"):
            dist.grow_group(dist.GroupMember.NON_GROUP_MEMBER)

    run_ranks(2, program)


def test_members_go_on_where_a_newcomer_has_ended() -> None:
    """Its ticket is there, and it is not; another's seat is taken."""

    def program(rank: int) -> object:
        store = dist.get_default_store()
        if rank == 0:
            ticket_store = TicketStore(store)
            ticket_store.leave_ticket(Ticket("token", 1, "thread nowhere"))
            ticket_store.leave_ticket(Ticket("other", 5, ended_identity()))
            assert tickets_waiting(dist.get_default_group())
        group = dist.grow_group()
        return group.size(), summed()

    assert run_ranks(2, program) == [(2, 2.0), (2, 2.0)]


def ended_identity() -> str:
    kind, place, pid, start, _ = process_identity().split(" ")
    return f"{kind} {place} {pid} {int(start) + 1}"
