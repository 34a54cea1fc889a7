"""Tails of rings: each operation, with exact times, none pushed out."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.flight.ring import Ring, Tail
from tilework.testing import run_ranks


def test_a_tail_tells_of_an_operation_when_it_begins_and_when_it_ends() -> None:
    ring = Ring(2)
    tail = ring.tail()
    slot = ring.begin(("barrier", None, (), (), None, None))
    assert [op.outcome for op in tail.read()] == ["running"]
    assert tail.read() == []
    ring.end(slot)
    (op,) = tail.read()
    assert op.outcome == "done"
    assert op.entered <= op.ended <= time.monotonic_ns()


def test_a_tail_has_more_operations_than_the_ring() -> None:
    ring = Ring(2)
    tail = ring.tail()
    for _ in range(10):
        ring.end(ring.begin("barrier"))
    assert [op.number for op in tail.read()] == list(range(1, 11))
    ring.cut()
    ring.begin("barrier")
    assert tail.read() == []


def _of_default_group(program: Callable[[Tail], None]) -> list[list[int]]:
    (tail,) = dist.get_default_group().flight_tails()
    program(tail)
    return [[op.number, op.entered, op.waited, op.finished, op.ended] for op in tail.read()]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_times_of_asynchronous_operations(kind: str) -> None:
    def program(rank: int) -> bool:
        def steps(tail: Tail) -> None:
            time.sleep(0.2 * rank)
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            time.sleep(0.02)
            assert work is not None
            work.wait()

        (_, entered, waited, finished, ended) = _of_default_group(steps)[-1]
        late = rank == 1 or entered + 15_000_000 < waited < finished
        return late and entered < finished <= ended

    assert run_ranks(2, program, kind=kind) == [True, True]  # type: ignore[arg-type]


def test_the_fast_path_loses_none_of_4000_operations() -> None:
    def program(rank: int) -> tuple[int, int]:
        (tail,) = dist.get_default_group().flight_tails()
        x = torch.ones(4)
        for _ in range(4000):
            dist.all_reduce(x)
        return len({op.number for op in tail.read()}), tail.lost

    assert run_ranks(2, program, kind="processes") == [(4000, 0)] * 2


def test_what_is_lost_is_counted() -> None:
    def program(rank: int) -> int:
        (tail,) = dist.get_default_group().flight_tails()
        x = torch.ones(4)
        for _ in range(9000):
            dist.all_reduce(x)
        return len(tail.read()) + tail.lost

    assert run_ranks(2, program, kind="processes") == [9000] * 2


@pytest.mark.usefixtures("without_core")
def test_the_times_of_asynchronous_operations_in_python() -> None:
    test_the_times_of_asynchronous_operations("threads")
