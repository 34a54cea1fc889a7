"""A rank that is stopped, or never comes, is named when the timeout passes."""

from __future__ import annotations

import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.test_death import TOLD
from tests.faults.workload import join, leave, random_steps, until_error
from tests.limits import PROMPTLY
from tests.random_programs import run_program
from tilework.errors import CollectiveTimeoutError, DistError

LIMIT = timedelta(milliseconds=1500)  # whoever is not stopped comes in time on a busy machine, too


@pytest.mark.parametrize("seed", range(5))
def test_sigstop_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    victim = draw.randrange(3)

    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store")
        dist.get_default_group().set_timeout(LIMIT)
        say("ready")
        say(until_error(lambda turn: run_program(random_steps(3, 1000 * seed + turn), rank)))
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(draw.uniform(0, 0.05))
        stopped = ranks[victim].kill(signal.SIGSTOP)
        errors = {n: rank.hear() for n, rank in enumerate(ranks) if n != victim}
        for heard in errors.values():
            assert heard.kind is CollectiveTimeoutError
            assert heard.ranks
            # A rank that came late to its wait for the stopped one may be named by the third, which
            # waits for it; its own error tells that it waited.
            for named in set(heard.ranks) - {victim}:
                aborted = f"the group was aborted by rank {3 - victim - named}"
                assert victim in errors[named].ranks or aborted in errors[named].text
            assert heard.when - stopped < LIMIT.total_seconds() + PROMPTLY
            assert TOLD.search(heard.text), heard.text
        ranks[victim].kill(signal.SIGCONT)
        # Woken up, it hears what the others think of it.
        assert ranks[victim].hear().kind is CollectiveTimeoutError


def test_a_short_stop_goes_unnoticed(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        say("ready")
        for _ in range(300):
            dist.all_reduce(torch.ones(2000))
        say("done")
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            rank.hear()
        ranks[1].kill(signal.SIGSTOP)
        time.sleep(0.2)
        ranks[1].kill(signal.SIGCONT)
        assert [rank.hear() for rank in ranks] == ["done", "done"]


def test_a_rank_that_never_comes_to_the_group(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        start = time.monotonic()
        if rank == 2:
            return
        # One of them may be the first to give up, and then the other's loss.
        with pytest.raises(DistError, match=r"2|lost rank") as caught:
            join(rank, 3, tmp_path / "store", LIMIT)
        say((time.monotonic() - start, str(caught.value)))

    with ForkedRanks(3, story) as ranks:
        for rank in ranks.others(2):
            seconds, text = rank.hear()
            assert seconds < LIMIT.total_seconds() + PROMPTLY, text


def test_a_rank_that_never_comes_to_a_sub_group(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store")
        start = time.monotonic()
        if rank != 1:
            with pytest.raises(DistError, match="1"):
                dist.new_group([0, 1, 2], timeout=LIMIT)
            say(time.monotonic() - start)
        else:
            time.sleep(1.5)
            say(0.0)
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            assert rank.hear() < LIMIT.total_seconds() + PROMPTLY


def test_a_rank_that_never_comes_to_an_operation(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store")
        dist.barrier()
        dist.get_default_group().set_timeout(LIMIT)
        start = time.monotonic()
        if rank == 0:
            time.sleep(2 * LIMIT.total_seconds())
        else:
            say((until_error(lambda turn: dist.broadcast(torch.ones(5, 7), src=0)), start))
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks.others(0):
            heard, start = rank.hear()
            assert heard.kind is CollectiveTimeoutError
            assert heard.ranks == (0,)
            assert (
                LIMIT.total_seconds() * 0.9 < heard.when - start < LIMIT.total_seconds() + PROMPTLY
            )
            for word in ("broadcast", "5, 7", "group 'default'", "#2", "rank 0", "test_absence.py"):
                assert word in heard.text, heard.text
