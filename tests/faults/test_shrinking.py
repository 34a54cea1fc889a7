"""Ranks that are killed or stopped, also while others agree on who is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backends.hybrid import hosts
from tilework.comm.backends.hybrid.hybrid_backend import HybridGroup
from tilework.errors import RankFailedError
from tilework.store import UnixStore
from tilework.testing import run_ranks


def die_in(seconds: float) -> None:
    """Kill this process then, whatever it does."""

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def go_on(rank: int) -> tuple[int, ...]:
    """Shrink until a barrier holds; the first numbers of those that are left, on all of them."""
    seats = torch.tensor([rank])
    while True:
        try:
            dist.barrier()
            out = [torch.zeros_like(seats) for _ in range(dist.get_world_size())]
            dist.all_gather(out, seats)
            return tuple(int(seat) for seat in out)
        except dist.DistBackendError:
            dist.shrink_group()


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_die_before_and_during_the_agreement(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.choice([3, 4, 5])
    victims = draw.sample(range(n), draw.randint(1, n - 1))
    moments = {victim: draw.uniform(0, 0.12) for victim in victims[1:]}

    def program(rank: int) -> tuple[int, ...]:
        dist.barrier()
        if rank == victims[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank in moments:
            die_in(moments[rank])
        left: tuple[int, ...] = ()
        while len(left) != n - len(victims):
            left = go_on(rank)
        return left

    results = run_ranks(n, program, kind="processes", return_exceptions=True)
    living = tuple(rank for rank in range(n) if rank not in victims)
    for rank, result in enumerate(results):
        if rank in victims:
            assert isinstance(result, RankFailedError)
        else:
            assert result == living


@pytest.mark.parametrize("victim", range(4))
def test_ranks_that_wait_for_those_that_know_of_a_loss_come_too(victim: int) -> None:
    """Gloo's ranks see the ends of their neighbours only: they wait in a ring."""

    def program(rank: int) -> object:
        dist.barrier()
        if rank == victim:
            time.sleep(0.1)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError):
            dist.all_reduce(torch.ones(3))
        return dist.shrink_group(timeout=timedelta(seconds=120)).origins

    results = run_ranks(4, program, kind="processes", backend="gloo", return_exceptions=True)
    living = tuple(rank for rank in range(4) if rank != victim)
    assert [results[rank] for rank in living] == [living] * 3


def test_a_stopped_rank_is_left_behind_and_told_so() -> None:
    limit = timedelta(seconds=1)

    def program(rank: int) -> object:
        pids: list[object] = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        dist.get_default_group().set_timeout(limit)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                dist.barrier()
            except dist.DistBackendError:
                with pytest.raises(dist.ExcludedError, match="rank 2 is out"):
                    dist.shrink_group()
                return "out"
        with pytest.raises(dist.CollectiveTimeoutError):
            dist.barrier()
        size = dist.shrink_group(timeout=limit).size()
        assert isinstance(pids[2], int)
        os.kill(pids[2], signal.SIGCONT)
        x = torch.ones(1)
        dist.all_reduce(x)
        return size, x.item()

    assert run_ranks(3, program, kind="processes") == [(2, 2.0), (2, 2.0), "out"]


def test_the_store_s_server_dies_with_rank_0() -> None:
    name = f"@tilework-test-{os.getpid()}"

    def program(rank: int) -> object:
        store = UnixStore(name, is_master=rank == 0, timeout=timedelta(seconds=120))
        dist.init_process_group("shm", store=store, rank=rank, world_size=3)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError):
            dist.barrier()
        dist.shrink_group()
        dist.get_default_store().set(f"from {dist.get_rank()}", "x")
        dist.get_default_store().wait(["from 0", "from 1"])
        pair = dist.new_group([0, 1])
        x = torch.ones(1)
        dist.all_reduce(x, group=pair)
        dist.barrier()
        dist.destroy_process_group()
        return x.item()

    results = run_ranks(3, program, kind="processes", init=False, return_exceptions=True)
    assert isinstance(results[0], RankFailedError)
    assert results[1:] == [2.0, 2.0]


def test_ranks_that_agree_through_a_store_say_that_it_is_gone() -> None:
    name = f"@tilework-test-gone-{os.getpid()}"

    def program(rank: int) -> None:
        store = UnixStore(name, is_master=rank == 0, timeout=timedelta(seconds=120))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError):
            dist.barrier()
        with pytest.raises(dist.DistNetworkError, match=r"cannot shrink.*store that outlives"):
            dist.shrink_group()

    results = run_ranks(3, program, kind="processes", init=False, return_exceptions=True)
    assert isinstance(results[0], RankFailedError)
    assert results[1:] == [None, None]


@pytest.mark.skipif(not dist.is_backend_available("hybrid"), reason="torch has no gloo")
def test_ranks_of_two_hosts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five are killed, among them the first of each host."""

    def host(request: dist.DistributedBackendOptions) -> str:
        return str(request.global_ranks_in_group[request.group_rank] % 2)

    monkeypatch.setattr(hosts, "host_identity", host)

    def program(rank: int) -> tuple[int, ...]:
        dist.barrier()
        if rank in (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        left: tuple[int, ...] = ()
        while len(left) != 3:
            left = go_on(rank)
        assert isinstance(dist.get_default_group(), HybridGroup)
        return left

    results = run_ranks(5, program, kind="processes", backend="hybrid", return_exceptions=True)
    assert results[2:] == [(2, 3, 4)] * 3
