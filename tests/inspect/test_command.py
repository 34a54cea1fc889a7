"""``tilework trace``, and ``tilework run --trace``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inspect.jobs import MS, operation, write_rank
from tilework.cli import dispatch

_PROGRAM = """
import time, torch, tilework.distributed as dist
dist.init_process_group()
for step in range(30):
    if dist.get_rank() == 1:
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1000))
"""


def test_run_writes_a_trace_that_the_command_explains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    command = [sys.executable, "-m", "tilework", "run", "-n", "2", "--trace", "t", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "what the ranks did: tilework trace t -o step.json" in done.stderr
    command = [sys.executable, "-m", "tilework", "trace", "t", "-o", "step.json"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "rank 1 is waited for" in told.stdout
    assert "before all_reduce at train.py:7" in told.stdout
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_the_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rank(tmp_path, 0, [operation(1, 0, 1), ["z", 9 * MS]])
    assert dispatch(["trace", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], told["waiting"]) == (1, {"0": 0.0})
    assert told["problems"] == ["there is no trace of rank 1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing"], "cannot read the folder"),
        (["t", "-o", "step.txt"], "must end in .json (for Perfetto, with a page beside it)"),
        (["t", "-o", "no/step.json"], "cannot write 'no/step.json': No such file or directory"),
    ],
)
def test_bad_input_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    write_rank(Path("t"), 0, [["z", MS]])
    assert dispatch(["trace", *arguments]) == 2
    assert told in capsys.readouterr().err
