"""Stragglers: told with how much slower they are, and nobody else."""

from __future__ import annotations

import time

import pytest

import tilework.distributed as dist
from tilework.comm.flight.diagnosis import diagnose
from tilework.comm.flight.document import GroupLog, Record
from tilework.comm.flight.ring import Entry
from tilework.comm.flight.stragglers import own_times, stragglers
from tilework.testing import run_ranks


def entries(own: float, count: int = 20) -> list[Entry]:
    """Operations of 0.1 s each, with ``own`` seconds between them."""
    return [
        Entry(n, "barrier", "a.py:1 in f", n * (own + 0.1), n * (own + 0.1) + 0.1, "ok", None, 0)
        for n in range(1, count)
    ]


def test_own_times_are_those_between_operations() -> None:
    assert own_times(entries(0.25, 4)) == pytest.approx({2: 0.25, 3: 0.25})


def test_a_straggler_is_told_with_its_ratio() -> None:
    times = {rank: own_times(entries(0.05 if rank == 3 else 0.02)) for rank in range(4)}
    (found,) = stragglers(times)
    assert (found.rank, found.operations) == (3, 18)
    assert found.ratio == pytest.approx(2.5)
    assert str(found) == (
        "rank 3 is 2.5 times as slow as the others: between two collectives it takes 50.0 ms of "
        "its own, they 20.0 ms (over 18 collectives)"
    )


def test_small_differences_and_few_operations_are_no_stragglers() -> None:
    assert stragglers({0: own_times(entries(0.02)), 1: own_times(entries(0.023))}) == []
    assert stragglers({0: own_times(entries(0.1, 4)), 1: own_times(entries(0.9, 4))}) == []
    assert stragglers({0: own_times(entries(0.1))}) == []
    assert stragglers({}) == []


def test_ranks_ask_each_other() -> None:
    def program(rank: int) -> list[int]:
        for _ in range(12):
            time.sleep(0.05 if rank == 1 else 0.001)
            dist.barrier()
        return [straggler.rank for straggler in dist.find_stragglers()]

    assert run_ranks(3, program) == [[1]] * 3


def test_explain_tells_them() -> None:
    records = {
        rank: Record(
            rank=rank,
            world_size=2,
            job="job",
            host="host",
            pid=1,
            written=100.0,
            faults=(),
            stacks=(),
            groups=(
                GroupLog("default", "shm", "", (0, 1), tuple(entries(0.05 if rank else 0.02))),
            ),
        )
        for rank in range(2)
    }
    texts = [finding.text for finding in diagnose(records) if finding.kind == "slow"]
    assert len(texts) == 1
    assert texts[0].startswith("rank 1 is 2.5 times as slow as the others")
