"""The objects that look at a rank's long waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.waits import long_waits
from tilework.comm.waits.by_rank import collective_wait, look_while_waiting, message_wait
from tilework.comm.world import World, current_world
from tilework.testing import run_ranks


class Counter:
    """Counts the looks of its rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def look(self, world: World) -> None:
        groups = list(world.records)
        collective, message = collective_wait(groups), message_wait(groups)
        self.seen.append((collective is not None, message is not None))


def test_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_waits, "_functions", [])
    look_while_waiting(Counter)
    look_while_waiting(Counter)

    def receiving(rank: int) -> list[tuple[bool, bool]]:
        counter = current_world().state(Counter)
        dist.barrier()
        if rank == 0:
            before = len(counter.seen)
            dist.recv(torch.zeros(1), 1)
            waited.set()
            return counter.seen[before:]
        time.sleep(1.0)  # long enough for a long wait, if not for its every look
        dist.send(torch.zeros(1), 0)
        assert waited.wait(20)
        return []

    waited = threading.Event()
    assert len(long_waits._functions) == 1
    assert set(run_ranks(2, receiving)[0]) <= {(False, True)}


def test_there_may_be_no_wait() -> None:
    def program(rank: int) -> bool:
        groups = list(current_world().records)
        return collective_wait(groups) is None and message_wait(groups) is None

    assert run_ranks(2, program) == [True, True]
