"""The clocks of other hosts, from what ranks did together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.jobs import MS, operation, write_rank
from tilework.inspect import Timeline, read_timeline
from tilework.inspect.events import trace_events


def two_hosts(folder: Path, shift: int, *, what: int = 1) -> Timeline:
    """Two ranks that meet ten times, each late in turn; rank 1's clock is ``shift`` ms ahead."""
    for rank in (0, 1):
        lines: list[list[Any]] = []
        for n in range(1, 11):
            late = n % 2 == rank
            line = operation(n, 20 * n + 8 * late, 20 * n + 10 + late)
            line[4] = what
            lines.append(line)
        ahead = {"clock": "other", "began": shift * MS, "wall": 5 * MS} if rank else {}
        write_rank(
            folder, rank, [["t", 9, "broadcast float32 [250]"], *lines, ["z", 300 * MS]], **ahead
        )
    return read_timeline(folder)


@pytest.mark.parametrize("shift", [3000, -3000, 0])
def test_a_shifted_clock_is_found_within_the_error_stated(tmp_path: Path, shift: int) -> None:
    timeline = two_hosts(tmp_path, shift)
    (told,) = timeline.problems
    found = re.fullmatch(
        r"rank 1 ran on another host, whose clock is known to (.*) ms, from operations of both",
        told,
    )
    assert found is not None
    assert float(found[1]) <= 3.0
    first = timeline.meetings[0].parts
    off = abs(first[1].entered - first[0].entered - 8 * MS)
    assert off <= float(found[1]) * MS
    assert all(wait.end - wait.start <= 11 * MS for wait in timeline.waits)


def test_operations_that_do_not_wait_for_all_say_nothing(tmp_path: Path) -> None:
    (told,) = two_hosts(tmp_path, 3000, what=9).problems
    assert "placed by the hosts' wall clocks: the error is not known" in told


def test_arrows_shorter_than_the_error_are_named(tmp_path: Path) -> None:
    lines = [operation(1, 0, 8), ["z", 9 * MS]]
    write_rank(tmp_path, 0, lines)
    write_rank(tmp_path, 1, [operation(1, 1, 8), ["z", 9 * MS]], clock="other")
    names = {
        e["name"] for e in trace_events(read_timeline(tmp_path))["traceEvents"] if e["ph"] == "s"
    }
    assert names == {"awaited (shorter than the clocks' error)"}
