"""A death is noticed soon, however often those who wait are woken meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.chaos.expected import NOTICE_SECONDS
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, leave, until_error

pytestmark = pytest.mark.skipif(not dist.is_shm_available(), reason="the core is not built")

#: Far longer than a death may go unnoticed.
LIMIT = timedelta(seconds=120)


def chat(turn: int) -> None:
    """Messages all the time, but with pauses, so that rank 0 goes to sleep between them."""
    dist.send(torch.ones(9), dst=0)
    time.sleep(0.002)


def assert_noticed(ranks: ForkedRanks) -> None:
    """Rank 1 is killed, and rank 0 hears of it in time."""
    for rank in ranks:
        rank.hear()
    time.sleep(0.1)
    died = ranks[1].kill()
    error = ranks[0].hear()
    assert error.kind is dist.PeerLostError
    assert error.ranks == (1,)
    assert error.when - died < NOTICE_SECONDS


@pytest.mark.parametrize("waiting", ["barrier", "recv", "async barrier"])
def test_signals_do_not_hide_a_death(waiting: str, tmp_path: Path) -> None:
    def wait(turn: int) -> None:
        if waiting == "recv":
            dist.recv(torch.ones(3), src=1)
        else:
            work = dist.barrier(async_op=waiting != "barrier")
            if work is not None:
                work.wait()

    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store", LIMIT)
        say("ready")
        if rank == 1:
            signal.pause()
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        say(until_error(wait))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        assert_noticed(ranks)


def test_other_messages_do_not_hide_a_death(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store", LIMIT)
        say("ready")
        if rank == 1:
            signal.pause()
        if rank == 2:
            say(until_error(chat))
        else:
            awaited = dist.irecv(torch.ones(3), src=1)
            assert awaited is not None
            listener = threading.Thread(
                target=until_error, args=(lambda turn: dist.recv(torch.ones(9), src=2),)
            )
            listener.start()
            say(until_error(lambda turn: awaited.wait()))
            listener.join()
        leave(store)

    with ForkedRanks(3, story) as ranks:
        assert_noticed(ranks)
