"""Who is late, and where; what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.inspect.jobs import MS, late_step, operation, traced, write_rank
from tilework.inspect import Summary, read_timeline, summarize, trace
from tilework.testing import run_ranks


def judged(folder: Path, own: dict[int, int], steps: int = 20) -> Summary:
    """Two ranks that reduce at a line after so many ms of their own, at another after 1 ms."""
    for rank in (0, 1):
        lines, now = [], 0
        for step in range(steps):
            ends = now + max(own.values()) + 1
            lines.append(operation(2 * step + 1, now + own[rank], ends))
            lines.append(operation(2 * step + 2, ends + 1, ends + 2, site=3))
            now = ends + 2
        write_rank(folder, rank, [*lines, ["z", now * MS]])
    return summarize(read_timeline(folder))


def test_the_late_rank_is_named_with_the_line(tmp_path: Path) -> None:
    summary = judged(tmp_path, {0: 1, 1: 6})
    (late,) = summary.late
    assert (late.rank, late.site, late.after) == (
        1,
        "train.py:40 in f",
        "all_reduce at train.py:38",
    )
    assert (round(late.seconds, 6), round(late.others, 6), late.operations) == (0.006, 0.001, 19)
    assert summary.waited_for == pytest.approx({0: 0.0, 1: 0.1})
    assert str(summary).splitlines()[0] == (
        "rank 1 is waited for 53% of 179.0 ms: before all_reduce at train.py:40 (after all_reduce "
        "at train.py:38); own time 6.0 ms, others 1.0 ms, 19 times"
    )


def test_even_work_blames_nobody(tmp_path: Path) -> None:
    summary = judged(tmp_path, {0: 4, 1: 4})
    assert (summary.late, summary.stragglers) == ((), ())
    assert str(summary).startswith("at no line is a rank late in most calls; ranks wait 0% of")


def test_a_rank_that_is_late_now_and_then_is_not_late_at_the_line(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [operation(n, 10 * n + 6 * (n % 2 == rank), 10 * n + 7) for n in range(1, 20)]
        write_rank(tmp_path, rank, [*lines, ["z", 300 * MS]])
    assert summarize(read_timeline(tmp_path)).late == ()


def test_a_rank_that_is_late_in_a_call_of_each_step_is_named_with_the_call(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines: list[list[Any]] = []
        for step in range(12):
            for call in range(4):  # of one line; rank 1 is late in the third
                at = 40 * step + 10 * call
                lines.append(operation(4 * step + call + 1, at + 5 * (rank and call == 2), at + 6))
            lines.append(["s", (40 * step + 38) * MS])
        write_rank(tmp_path, rank, [*lines, ["z", 480 * MS]])
    summary = summarize(read_timeline(tmp_path))
    assert [(late.rank, late.place, late.operations) for late in summary.late] == [(1, (3, 4), 12)]
    assert ", call 3 of 4 in each step; own time 9.0 ms, others 4.0 ms" in str(summary)


def test_one_long_delay_is_told(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [operation(1, 0, 1), operation(2, 2, 902), ["z", 903 * MS]])
    write_rank(tmp_path, 1, [operation(1, 0, 1), operation(2, 901, 902), ["z", 903 * MS]])
    (late,) = summarize(read_timeline(tmp_path)).late
    assert (late.rank, late.operations) == (1, 1)


def test_what_is_computed_during_an_operation_hides_it(tmp_path: Path) -> None:
    line = operation(1, 0, 10)
    line[9:12] = [8 * MS, 10 * MS, 10 * MS]  # waited for since 8 ms
    for rank in (0, 1):
        write_rank(tmp_path, rank, [line, ["z", 10 * MS]], limits={"all_reduce": 2e9})
    summary = summarize(read_timeline(tmp_path))
    assert (summary.speeds[0].hidden, summary.speeds[0].bytes) == (0.8, 1000)
    assert str(summary).splitlines()[1] == (
        "default all_reduce 1.0 kB: 0.0001 of 2.0 GB/s, 1 times; hidden behind computing: 80%"
    )


def test_a_sleeping_rank_is_named_with_the_line_and_the_span(tmp_path: Path) -> None:
    summary = traced(tmp_path, late_step(2)).summary()
    late = summary.late[0]
    assert (late.rank, late.operation, late.span) == (2, "all_reduce", "forward")
    assert "jobs.py" in late.site
    assert summary.waited_for[2] > 0.08


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_own_times_are_those_of_find_stragglers(tmp_path: Path, kind: str) -> None:
    def program(rank: int) -> tuple[dist.Straggler, dist.Straggler]:
        with trace(tmp_path) as seen:
            for _ in range(20):
                late_step(1)(rank)
        (live,) = dist.find_stragglers()
        dist.barrier()
        (read,) = seen.summary().stragglers
        return live, read

    for live, read in run_ranks(2, program, kind=kind):  # type: ignore[arg-type]
        assert (live.rank, live.operations) == (read.rank, read.operations) == (1, 39)
        assert read.seconds == pytest.approx(live.seconds, abs=1e-4)
        assert read.others == pytest.approx(live.others, abs=1e-4)


def test_a_trace_without_operations_says_so(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        with trace(tmp_path) as seen, dist.span("alone"):
            torch.ones(2)
        return str(seen.summary())

    (text,) = run_ranks(1, program)
    assert "no collective was seen" in text
