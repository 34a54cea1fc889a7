"""Long waits: the functions that look at them, and the objects of a rank that do."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.waits import by_rank
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
    monkeypatch.setattr(by_rank, "_functions", [])
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
        assert waited.wait(120)
        return []

    waited = threading.Event()
    assert len(by_rank._functions) == 1
    assert set(run_ranks(2, receiving)[0]) <= {(False, True)}


def test_there_may_be_no_wait() -> None:
    def program(rank: int) -> bool:
        groups = list(current_world().records)
        return collective_wait(groups) is None and message_wait(groups) is None

    assert run_ranks(2, program) == [True, True]


def test_it_is_called_for_a_long_wait_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(by_rank, "_functions", [lambda: calls.append("called")])
    by_rank.look_if_long(time.monotonic())
    assert not calls
    by_rank.look_if_long(time.monotonic() - 2 * by_rank.AFTER_SECONDS)
    assert calls == ["called"]


def test_a_function_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(by_rank._functions)
    monkeypatch.setattr(by_rank, "_functions", [*before])

    def first() -> None:
        pass

    for function in (first, first):
        by_rank.add_function(function)
    assert by_rank._functions == [*before, first]
