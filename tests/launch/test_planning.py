"""``tilework plan`` and ``tilework run --pretend``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilework.cli import dispatch

PROGRAM = """
import torch
import tilework.distributed as dist

dist.init_process_group()
if dist.get_rank() == dist.get_world_size() - 1 and {parts}:
    dist.barrier()
dist.all_reduce(torch.ones(1000))
print("rank", dist.get_rank())
"""


def script(folder: Path, parts: bool = False) -> str:
    path = folder / "train.py"
    path.write_text(PROGRAM.format(parts=parts))
    return str(path)


def test_a_plan_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "512", "--hosts", "60", "--memory", "1GB", script(tmp_path)]
    assert dispatch(["plan", *given]) == 0
    printed = capsys.readouterr().out
    assert "rank 0" in printed
    assert "ranks 0, 1, 511" in printed
    assert "world" in printed


def test_ranks_that_part_end_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["run", "--pretend", "8", script(tmp_path, parts=True)]) == 1
    assert "barrier on rank 7" in capsys.readouterr().out


def test_too_little_memory_ends_with_status_1(tmp_path: Path) -> None:
    assert dispatch(["plan", "--ranks", "2", "--memory", "1 KB", script(tmp_path)]) == 1


def test_unknown_memory_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dispatch(["plan", "--ranks", "2", "--memory", "lots", script(tmp_path)])
    assert "'80 GB'" in capsys.readouterr().err
