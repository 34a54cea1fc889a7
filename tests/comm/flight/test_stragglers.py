"""Stragglers: told with how much slower they are, and nobody else."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

import tilework.distributed as dist
from tilework.comm.flight import ring
from tilework.comm.flight.diagnosis import diagnose
from tilework.comm.flight.document import GroupLog, Record
from tilework.comm.flight.ring import Entry
from tilework.comm.flight.stragglers import Straggler, own_times, slowest, stragglers
from tilework.mesh import init_device_mesh
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
    assert str([found]) == f"[{found}]"


def test_small_differences_and_few_operations_are_no_stragglers() -> None:
    assert stragglers({0: own_times(entries(0.02)), 1: own_times(entries(0.023))}) == []
    assert stragglers({0: own_times(entries(0.1, 4)), 1: own_times(entries(0.9, 4))}) == []
    assert stragglers({0: own_times(entries(0.1))}) == []
    assert stragglers({}) == []


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


def waiting(entered: float, ended: float | None, peer: int | None = None) -> Entry:
    """A collective of another group, or a message."""
    number = 7 if peer is None else 0
    return Entry(number, "recv", "a.py:1 in f", entered, ended, "ok", peer, 0)


def test_time_in_other_operations_is_not_a_rank_s_own() -> None:
    ours = entries(0.25, 4)  # gaps from 0.45, 0.80 and so on, of 0.25 s each
    assert own_times(ours, [waiting(0.5, 0.6)]) == pytest.approx({2: 0.15, 3: 0.25})
    assert own_times([*ours, waiting(0.5, 0.6, peer=1)]) == pytest.approx({2: 0.15, 3: 0.25})
    assert own_times(ours, [waiting(0.5, 0.6), waiting(0.4, 0.5)])[2] == pytest.approx(0.1)
    unfinished_or_async = [waiting(0.5, None), waiting(0.2, 1.0)]
    assert own_times(ours, unfinished_or_async) == pytest.approx({2: 0.25, 3: 0.25})


def test_one_that_was_late_once_is_told_so() -> None:
    own = dict.fromkeys(range(2, 22), 0.01)
    (found,) = stragglers({0: own, 1: {**own, 9: 2.01}, 2: own})
    assert str(found).startswith(
        "rank 1 was late once, by 2.00 s: between two collectives it takes"
    )


def test_a_rank_in_several_groups_is_told_once() -> None:
    often, seldom = Straggler(1, 0.02, 0.01, 100), Straggler(1, 0.09, 0.01, 2)
    other = Straggler(2, 0.05, 0.01, 100)
    assert slowest([often, other, seldom]) == [other, often]


class RanksClock(threading.local):
    """A time for each rank, which does not depend on the machine: ranks are threads.

    Work moves it on, and the end of a barrier is the entry of the last rank.

    Args:
        entries: For each barrier the times of entry, by thread; one dict for all ranks.
    """

    def __init__(self, entries: dict[Any, dict[int, float]]) -> None:
        self.seconds, self.entries = 0.0, entries
        self.counts: Counter[Any] = Counter()
        self.met: dict[int, float] | None = None

    def __call__(self) -> float:
        """The time; asked at the beginning of each operation, and at the end."""
        me = threading.get_ident()
        if self.met is not None and me in self.met:
            self.seconds = max(self.met.values())
        elif self.met is not None:
            self.met[me] = self.seconds
        return self.seconds

    def barrier(self, group: Any) -> None:
        self.counts[group] += 1
        self.met = self.entries.setdefault((group.global_ranks, self.counts[group]), {})
        dist.barrier(group)
        self.met = None


@pytest.mark.usefixtures("without_core")  # whose clock is its own
def test_who_waits_in_another_axis_is_no_straggler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 waits for rank 3 along the second axis, so rank 0 waits for rank 2 along the first."""

    def program(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        for _ in range(8):
            for _ in range(3):
                clock.seconds += 0.06 if rank == 3 else 0.01
                clock.barrier(tp)
            clock.barrier(dp)
        return [[one.rank for one in dist.find_stragglers(group)] for group in (None, tp, dp)]

    clock = RanksClock({})
    monkeypatch.setattr(ring, "_now", lambda: round(1e9 * clock()))
    named = {0: [], 1: [3], 2: [], 3: [3]}
    results = run_ranks(4, program)
    assert [result[0] for result in results] == [[3]] * 4
    assert [result[1] for result in results] == [[], [], [3], [3]]
    assert {rank: result[2] for rank, result in enumerate(results)} == named


@pytest.mark.usefixtures("without_core")  # whose clock is its own
def test_ranks_ask_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[int]:
        for _ in range(12):
            clock.seconds += 0.05 if rank == 1 else 0.001
            clock.barrier(dist.get_default_group())
        return [straggler.rank for straggler in dist.find_stragglers()]

    clock = RanksClock({})
    monkeypatch.setattr(ring, "_now", lambda: round(1e9 * clock()))
    assert run_ranks(3, program) == [[1]] * 3
