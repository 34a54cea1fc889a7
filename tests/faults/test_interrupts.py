"""Signals and forks in the middle of operations."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.test_death import assert_told
from tests.faults.workload import join, leave, until_error
from tests.limits import PROMPTLY


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_ends_a_waiting_rank_and_tells_the_others(async_op: bool, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store")
        say("ready")
        if rank == 0:

            def reduce() -> None:
                work = dist.all_reduce(torch.ones(2), async_op=async_op)
                assert work is not None
                work.wait()

            with pytest.raises(KeyboardInterrupt):
                reduce()
            say(time.monotonic())
            with pytest.raises(KeyboardInterrupt):
                signal.pause()
        else:
            # Rank 1 waits too; rank 2 comes when all is over.
            time.sleep(rank - 1)
            say(until_error(lambda turn: dist.all_reduce(torch.ones(2))))
        leave(store)

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(0.1)
        pressed = ranks[0].kill(signal.SIGINT)
        assert ranks[0].hear() - pressed < PROMPTLY
        for rank in ranks.others(0):
            heard = rank.hear()
            assert heard.when - pressed < PROMPTLY
            assert heard.ranks == (0,)
            assert "KeyboardInterrupt" in heard.text
        ranks[0].kill(signal.SIGINT)


def test_a_signal_handler_that_returns_disturbs_nothing(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        rang = []
        signal.signal(signal.SIGUSR1, lambda number, frame: rang.append(number))
        store = join(rank, 2, tmp_path / "store")
        say("ready")
        if rank == 1:
            time.sleep(0.3)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        say((len(rang), tensor.tolist()))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            rank.hear()
        for _ in range(3):
            time.sleep(0.05)
            ranks[0].kill(signal.SIGUSR1)
        (rang, mine), others = [rank.hear() for rank in ranks]
        assert 1 <= rang <= 3  # signals that come before the last was handled are one
        assert mine == [2.0, 2.0]
        assert others == (0, [2.0, 2.0])


def test_a_forked_child_has_no_group_and_leaves_the_parents_alone(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        group = dist.get_default_group()
        pid = os.fork()
        if not pid:
            refused = 0
            if not dist.is_initialized():
                try:
                    dist.all_reduce(torch.ones(1), group=group)
                except dist.DistBackendError:
                    refused = 1
            group.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        say(tensor.tolist())
        leave(store)

    with ForkedRanks(2, story) as ranks:
        assert [rank.hear() for rank in ranks] == [[2.0, 2.0]] * 2


def test_a_child_that_outlives_a_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        worker = os.fork() if rank == 1 else 0
        if rank == 1 and not worker:
            time.sleep(5)
            os._exit(0)
        say(worker)
        if rank == 1:
            signal.pause()
        say(until_error(lambda turn: dist.all_reduce(torch.ones(3))))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        ranks[0].hear()
        worker = ranks[1].hear()
        died = ranks[1].kill()
        try:
            assert_told(ranks[0].hear(), 1, died)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_debugger_may_stop_everyone(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        say("ready")
        for _ in range(2000):
            dist.all_reduce(torch.ones(100))
        say("done")
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            rank.hear()
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                rank.kill(number)
            time.sleep(0.03)
        assert [rank.hear() for rank in ranks] == ["done", "done"]
