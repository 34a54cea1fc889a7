"""One clock for all ranks, and who waits for whom."""

from __future__ import annotations

from pathlib import Path

from tests.inspect.jobs import MS, operation, write_rank
from tilework.inspect import read_timeline


def test_a_broadcast_waits_for_the_root_alone(tmp_path: Path) -> None:
    group = ["g", 1, "default", "shm", "", [0, 1, 2]]
    for rank, times in ((0, (5, 6)), (1, (0, 7)), (2, (10, 11))):
        write_rank(tmp_path, rank, [group, operation(1, *times), ["z", 20 * MS]])
    (wait,) = read_timeline(tmp_path).waits
    assert (wait.waiting.rank, wait.awaited.rank, wait.end - wait.start) == (1, 0, 5 * MS)


def test_a_collective_that_lacks_a_rank_is_not_judged(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [operation(1, 0, 5), ["z", 9 * MS]])
    timeline = read_timeline(tmp_path)
    assert list(timeline.waits) == []
    assert timeline.problems == ["there is no trace of rank 1"]
