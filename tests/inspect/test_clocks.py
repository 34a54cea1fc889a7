"""The clocks of other hosts, from what ranks did together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import two_hosts as namespaces
from tests.hosts import why_no_hosts
from tests.inspect.jobs import MS, operation, write_rank
from tilework.inspect import Timeline, read_timeline
from tilework.inspect.events import trace_events
from tilework.inspect.reading import read_file

ROOT = Path(__file__).parents[2]


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


#: Shifts the monotonic clock by 300 s, and no other.
SHIFTED = ("unshare", "--time", "--monotonic", "300", "--fork")


def why_no_clocks() -> str | None:
    """The reason why two hosts with different clocks cannot be made here; None if they can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    if subprocess.run([*SHIFTED, "true"], capture_output=True).returncode:
        return "this system lets nobody make time namespaces"
    return why_no_hosts()


PROGRAM = """
import sys, time, tilework.distributed as dist
from tilework.inspect import trace
from tests.hosts import Host, joined
rank, *hosts = sys.argv[1:]
with joined([Host(*host.split()) for host in hosts], (0, 1), int(rank)):
    with trace("trace"):
        for step in range(40):
            time.sleep(0.01 * (step % 2 == int(rank)))
            dist.barrier()
"""


@pytest.mark.skipif(why_no_clocks() is not None, reason=str(why_no_clocks()))
def test_clocks_of_two_namespaces_are_aligned_within_the_error_stated(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(PROGRAM)
    with namespaces() as hosts:
        told = [f"{host.name} {host.interface} {host.address}" for host in hosts]
        commands = [
            (*shift, sys.executable, "rank.py", str(rank), *told)
            for rank, shift in enumerate([(), SHIFTED])
        ]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for tests.hosts
        environment = {**os.environ, "PYTHONPATH": paths}
        jobs = [subprocess.Popen(each, cwd=tmp_path, env=environment) for each in commands]
        assert [job.wait(timeout=240) for job in jobs] == [0, 0]
    raw = [read_file(tmp_path / "trace" / f"rank-{rank}.jsonl") for rank in (0, 1)]
    assert abs(raw[1].began - raw[0].began - 300e9) < 200e9  # the clocks do differ
    timeline = read_timeline(tmp_path / "trace")
    assert "another host, whose clock is known to" in timeline.problems[0]
    # Both namespaces have one wall clock, which tells where operations ought to be.
    ours, theirs = (trace.operations[0].entered for trace in timeline.ranks)
    ought = [trace.wall + trace.operations[0].entered for trace in raw]
    assert abs((theirs - ours) - (ought[1] - ought[0])) <= timeline.ranks[1].clock_error + 1e6
