"""A rank that becomes another program, or is in another namespace, is noticed as one that dies."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, leave, until_error
from tests.limits import PROMPTLY
from tilework.errors import PeerLostError

_CLONE_NEWPID = 0x2000_0000


def all_reduce_until_error(rank: int, folder: Path, say: Say) -> None:
    store = join(rank, 3, folder / "store")
    dist.barrier()
    say("ready")
    if rank == 1:
        say(time.monotonic())
        os.execvp("sleep", ["sleep", "30"])
    say(until_error(lambda turn: dist.all_reduce(torch.ones(1000))))
    leave(store)


def test_exec_is_noticed(tmp_path: Path) -> None:
    with ForkedRanks(3, lambda rank, say: all_reduce_until_error(rank, tmp_path, say)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        gone = ranks[1].hear()
        for rank in ranks.others(1):
            heard = rank.hear()
            assert (heard.kind, heard.ranks) == (PeerLostError, (1,)), heard
            assert heard.when - gone < 2.0
        ranks[1].kill()


def test_a_child_that_outlives_its_rank_does_not_keep_it_alive(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        join(rank, 2, tmp_path / "store")
        dist.barrier()
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            say(child)
            os.execvp("sleep", ["sleep", "30"])
        say(until_error(lambda turn: dist.all_reduce(torch.ones(1000))).ranks)

    with ForkedRanks(2, story) as ranks:
        child = ranks[1].hear()
        try:
            assert ranks[0].hear() == (1,)
        finally:
            os.kill(child, signal.SIGKILL)
            ranks[1].kill()


def enter_another_pid_namespace() -> int:
    """The process's child there, as seen from outside; 0 in the child."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    return os.fork()


@pytest.mark.skipif(os.geteuid() != 0, reason="making pid namespaces needs root")
def test_a_rank_in_another_pid_namespace_is_noticed(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        if rank == 1:
            child = enter_another_pid_namespace()
            if child:
                say(child)
                os.waitpid(child, 0)
                return
        store = join(rank, 2, tmp_path / "store")
        dist.barrier()
        say("ready")
        say(until_error(lambda turn: dist.all_reduce(torch.ones(1000))))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        child = ranks[1].hear()
        assert [rank.hear() for rank in ranks] == ["ready"] * 2
        time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        died = time.monotonic()
        heard = ranks[0].hear()
        assert (heard.kind, heard.ranks) == (PeerLostError, (1,)), heard
        assert heard.when - died < PROMPTLY
