"""Hybrid groups whose ranks die, stop or leave, on one machine that pretends to be two hosts."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.backends.hybrid.test_hybrid_backend import pretend
from tests.faults.forked_ranks import ForkedRanks, Holdings, Say
from tests.faults.workload import leave, random_steps, until_error
from tests.limits import PROMPTLY
from tests.random_programs import run_program

pytestmark = pytest.mark.skipif(
    not dist.is_backend_available("hybrid"), reason="the core is not built, or torch has no gloo"
)


@pytest.fixture(autouse=True)
def _two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank: rank % 2)


LIMIT = timedelta(seconds=120)


def join(rank: int, n: int, path: Path, backend: str = "hybrid") -> dist.FileStore:
    store = dist.FileStore(os.fspath(path), n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=LIMIT)
    return store


def warm_up(rank: int, path: Path, backend: str) -> Holdings:
    """Have a group once, so that only what every further group leaves behind counts."""
    leave(join(0, 1, path.with_name(f"alone {rank}"), backend))
    store = join(rank, 4, path.with_name("warm"), backend)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    leave(store)
    time.sleep(0.3)
    return Holdings.now()


@pytest.mark.parametrize(
    ("backend", "seed"), [*(("hybrid", seed) for seed in range(4)), ("gloo", 1), ("gloo", 2)]
)
def test_kill_9_at_a_random_moment(backend: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    victim = draw.randrange(4)

    def story(rank: int, say: Say) -> None:
        before = warm_up(rank, tmp_path / "first", backend)
        store = join(rank, 4, tmp_path / "first", backend)
        say("ready")
        say(until_error(lambda turn: run_program(random_steps(4, 1000 * seed + turn), rank)))
        leave(store)
        after = Holdings.now()
        deadline = time.monotonic() + 5  # Gloo's threads take a moment to end
        while after != before and time.monotonic() < deadline:
            time.sleep(0.05)
            after = Holdings.now()
        say((before, after))

    with ForkedRanks(4, story) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(draw.uniform(0, 0.1))
        died = ranks[victim].kill()
        for rank in ranks.others(victim):
            heard = rank.hear()
            assert heard.kind is dist.PeerLostError, heard
            assert heard.ranks == (victim,), heard
            assert heard.when - died < PROMPTLY, heard
        for rank in ranks.others(victim):
            before, after = rank.hear()
            assert after == before


@pytest.mark.parametrize("backend", ["hybrid", "gloo"])
def test_a_stopped_rank_is_named_when_the_time_is_up(backend: str, tmp_path: Path) -> None:
    limit = timedelta(seconds=1)

    def story(rank: int, say: Say) -> None:
        store = join(rank, 4, tmp_path / "store", backend)
        dist.get_default_group().set_timeout(limit)
        say("ready")
        say(until_error(lambda turn: dist.barrier()))
        leave(store)

    with ForkedRanks(4, story) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        stopped = ranks[3].kill(signal.SIGSTOP)
        for rank in ranks.others(3):
            heard = rank.hear()
            assert heard.kind is dist.CollectiveTimeoutError
            assert 3 in heard.ranks
            assert heard.when - stopped < limit.total_seconds() + PROMPTLY
        ranks[3].kill(signal.SIGCONT)
        assert issubclass(ranks[3].hear().kind, dist.DistBackendError)


def test_a_rank_that_leaves_while_needed(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 4, tmp_path / "store")
        dist.barrier()
        if rank != 2:
            say(until_error(lambda turn: dist.all_reduce(torch.ones(5, 7))))
        leave(store)

    with ForkedRanks(4, story) as ranks:
        for rank in ranks.others(2):
            heard = rank.hear()
            assert heard.kind is dist.PeerLostError
            assert heard.ranks == (2,)
            assert "all_reduce" in heard.text


def test_death_while_a_message_is_awaited_on_another_host(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        child = os.fork() if rank == 1 else 0
        if rank == 1 and not child:  # a child that outlives the rank must not hide the death
            time.sleep(60)
            os._exit(0)
        say(child)
        if rank == 1:
            signal.pause()
        say(until_error(lambda turn: dist.recv(torch.ones(3), src=1)))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        ranks[0].hear()
        child = ranks[1].hear()
        time.sleep(0.05)
        died = ranks[1].kill()
        try:
            heard = ranks[0].hear()
        finally:
            os.kill(child, signal.SIGKILL)
        assert heard.kind is dist.PeerLostError
        assert heard.ranks == (1,)
        assert heard.when - died < PROMPTLY
