"""``tilework run --watch``: steps, who is behind, the share of waiting, ranks without an answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilework.comm.flight.document import GroupLog, Record
from tilework.comm.flight.ring import Entry
from tilework.launch.rank_line import RankLine, behind, share_of_waiting

_PROGRAM = """
import os, time, torch, tilework.distributed as dist
dist.init_process_group()
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight])
while True:
    time.sleep(0.1 * dist.get_rank())
    weight.grad = torch.ones(8)
    weight.grad[0] = os.path.exists("stop")
    dist.all_reduce(weight.grad)
    optimizer.step()
    if weight.grad[0]:
        break
"""


def test_a_line_names_steps_the_late_rank_and_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    command = [sys.executable, "-m", "tilework", "run", "-n", "2", "--watch", "1", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        told = next((line for line in job.stderr if "rank 1 is" in line and "(+" in line), "")
        (tmp_path / "stop").touch()
        rest = job.stderr.read()
    assert job.returncode == 0, rest
    assert "as slow as the others" in told
    assert "; waiting " in told
    assert "MiB at most" in told


def test_a_rank_without_an_answer_is_named(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = RankLine(0.01, tmp_path, lines.append)
    ranks: Any = [SimpleNamespace(rank=3, pid=os.getpid(), alive=True)]
    asked: list[int] = []
    while not lines:
        watch.look(ranks, asked.append)
        time.sleep(0.01)
    assert "no answer from rank 3" in lines[0]
    assert len(asked) == 1


def records(*entries: list[Entry], written: float = 10.0) -> dict[int, Record]:
    ranks = tuple(range(len(entries)))
    return {
        rank: Record(
            *(rank, 2, "here", 7, "", written, (), ()), (GroupLog("g", "shm", "", ranks, each),)
        )
        for rank, each in enumerate(map(tuple, entries))
    }


def test_ranks_that_stand_still_are_told_with_the_missing_rank() -> None:
    waits = [
        Entry(1, "barrier", "a.py:3 in f", 0.0, 1.0, "done"),
        Entry(2, "barrier", "a.py:3 in f", 2.0, None, "running"),
    ]
    both = records(waits, waits[:1])
    assert "rank 1 has not come" in behind(both, 5.0)
    assert behind(both, 20.0) == "no rank is behind"
    assert share_of_waiting(both) == "waiting 40%, at most rank 0 80%"
