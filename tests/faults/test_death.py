"""A rank that dies is noticed within a second, at any moment of any operation."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Holdings, Say
from tests.faults.workload import SeenError, join, leave, serve, until_error
from tests.limits import PROMPTLY
from tilework.errors import PeerLostError

TOLD = re.compile(r"(\[[\d, ]*\]|barrier).*group 'default'.*#\d+", re.DOTALL)


BACKENDS = pytest.mark.parametrize("backend", ["shm", "gloo"])


def assert_told(heard: SeenError, victim: int, died: float) -> None:
    """Every survivor hears soon, and of the right rank."""
    assert heard.kind is PeerLostError, heard
    assert heard.ranks == (victim,), heard
    assert heard.when - died < PROMPTLY, heard
    assert f"rank {victim}" in heard.text
    assert TOLD.search(heard.text), heard.text


def assert_nothing_left(before: Holdings, after: Holdings) -> None:
    assert after == before


@pytest.mark.parametrize("seed", range(24))
def test_kill_9_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    n = draw.choice([2, 3, 4])
    victim = draw.randrange(n)
    with ForkedRanks(n, lambda rank, say: serve(rank, n, seed, tmp_path, say)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(draw.uniform(0, 0.06))
        died = ranks[victim].kill()
        for rank in ranks.others(victim):
            assert_told(rank.hear(), victim, died)
            assert_nothing_left(*rank.hear())
        for rank in ranks.others(victim):
            assert rank.hear() == [n - 1.0] * 3
            assert rank.reap() == 0
        assert ranks[victim].reap() == -signal.SIGKILL


@pytest.mark.parametrize("seed", range(8))
def test_exit_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    draw = random.Random(100 + seed)
    n, seconds = 3, draw.uniform(0.005, 0.06)
    victim = draw.randrange(n)

    def story(rank: int, say: Say) -> None:
        alarm = threading.Timer(seconds, os._exit, (7,))
        serve(rank, n, seed, tmp_path, say, alarm.start if rank == victim else int)

    with ForkedRanks(n, story) as ranks:
        assert ranks[victim].reap() == 7
        died = time.monotonic()
        for rank in ranks.others(victim):
            assert rank.hear() == "ready"
            assert_told(rank.hear(), victim, died)
            assert_nothing_left(*rank.hear())
            assert rank.hear() == [2.0] * 3


@BACKENDS
@pytest.mark.parametrize("seed", range(4))
def test_two_die_at_once(seed: int, backend: str, tmp_path: Path) -> None:
    draw = random.Random(200 + seed)
    victims = set(draw.sample(range(4), 2))

    def story(rank: int, say: Say) -> None:
        store = join(rank, 4, tmp_path / "store", backend=backend)
        say("ready")
        say(until_error(lambda turn: dist.all_reduce(torch.ones(1000))))
        leave(store)

    with ForkedRanks(4, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(draw.uniform(0, 0.03))
        died = max(ranks[victim].kill() for victim in victims)
        for i in set(range(4)) - victims:
            heard = ranks[i].hear()
            assert heard.kind is PeerLostError
            assert set(heard.ranks) <= victims
            assert heard.when - died < PROMPTLY


@BACKENDS
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_in_the_middle_of_a_large_operation(seed: int, backend: str, tmp_path: Path) -> None:
    draw = random.Random(300 + seed)
    victim = draw.randrange(3)

    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store", backend=backend)
        tensor, parts = torch.ones(3_000_000), torch.ones(1_000_000)
        say("ready")
        if seed % 2:
            say(until_error(lambda turn: dist.all_reduce(tensor, op=dist.ReduceOp.MAX)))
        else:
            say(until_error(lambda turn: dist.all_gather_into_tensor(tensor, parts)))
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(draw.uniform(0, 0.05))
        died = ranks[victim].kill()
        for rank in ranks.others(victim):
            assert_told(rank.hear(), victim, died)


@BACKENDS
def test_a_rank_that_leaves_while_needed(backend: str, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store", backend=backend)
        dist.barrier()
        say(time.monotonic())
        if rank != 1:
            say(until_error(lambda turn: dist.all_reduce(torch.ones(5, 7))))
        leave(store)

    with ForkedRanks(3, story) as ranks:
        left = ranks[1].hear()
        for rank in ranks.others(1):
            rank.hear()
            heard = rank.hear()
            assert_told(heard, 1, left)
            assert "all_reduce" in heard.text
            assert "5, 7" in heard.text


@BACKENDS
def test_death_while_a_message_is_awaited(backend: str, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store", backend=backend)
        say("ready")
        if rank == 1:
            signal.pause()
        say(until_error(lambda turn: dist.recv(torch.ones(3), src=1)))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(0.05)
        died = ranks[1].kill()
        assert_told(ranks[0].hear(), 1, died)


@BACKENDS
def test_death_of_a_bystander_does_not_disturb_a_sub_group(backend: str, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store", backend=backend)
        group = dist.new_group([0, 1])
        say("ready")
        if rank == 2:
            signal.pause()
        for _ in range(200):
            dist.all_reduce(torch.ones(1000), group=group)
        say("fine")
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            rank.hear()
        ranks[2].kill()
        for rank in ranks.others(2):
            assert rank.hear() == "fine"
