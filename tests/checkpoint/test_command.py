"""``tilework checkpoint`` and what stands behind it: show, verify, diff."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.states import dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, SaveOptions
from tilework.cli import dispatch
from tilework.dtensor import Shard
from tilework.testing import run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def program(rank: int) -> None:
        x = dtensor(numbers(8, 6), (2,), [Shard(0)])
        state = {"w": x, "b": numbers(3), "step": 7, "seed": rank}
        checkpoint.save(state, tmp_path / "one", SaveOptions(meta={"step": 7}))

    run_ranks(2, program)
    return tmp_path / "one"


def run(*arguments: object) -> int:
    return dispatch(["checkpoint", *map(str, arguments)])


def test_show_of_a_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(3, 4)}, tmp_path / "m.safetensors")
    assert run("show", tmp_path / "m.safetensors") == 0
    shown = capsys.readouterr().out
    assert "a       F32    [3, 4]   48 B" in shown
    assert shown.rstrip().endswith("none")  # such files have no checksums


def test_show_of_the_checkpoints_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = checkpoint.CheckpointManager(tmp_path)
    for step, loss in ((10, 0.3), (20, 0.5)):
        manager.save(step, {"w": torch.ones(4)}, {"loss": loss})
    assert run("show", tmp_path) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "10 16 B loss 0.3 (lowest)" in lines
    assert "20 16 B loss 0.5, latest" in lines


def test_show_does_without_torch(tmp_path: Path) -> None:
    values = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "t": (1,), "r": [1, None]}
    checkpoint.save({"w": torch.ones(4), **values}, tmp_path / "c")
    checkpoint.CheckpointManager(tmp_path / "run").save(3, {"w": torch.ones(4)}, {"loss": 1.0})
    save_file({"a": torch.ones(3, 4)}, tmp_path / "m.safetensors")
    program = (
        "import sys; from tilework.cli import dispatch\n"
        "for path in ('c', 'run', 'm.safetensors'): dispatch(['checkpoint', 'show', path])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for name, value in values.items():
        assert f"\n{name} = {value!r}\n" in done.stdout.decode()


def test_indices_and_runs_are_shown_in_notebooks(saved: Path, tmp_path: Path) -> None:
    index = checkpoint.index_of(saved)
    assert repr(index).startswith("Index(2 tensors, ")
    assert "<b>tensor  </b><b>dtype" in index._repr_html_()
    assert "background:" in index._repr_html_()
    manager = checkpoint.CheckpointManager(tmp_path / "run")
    assert "0 checkpoints" in manager._repr_html_()
    manager.save(3, {"w": torch.ones(4)}, {"<b>": 1.0})
    assert "&lt;b&gt; 1 (lowest), latest" in manager._repr_html_()


def test_show_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", tmp_path / "none") == 2
    assert "there is nothing at" in capsys.readouterr().err


def test_values_are_shown_as_python_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save({"t": (1, 2)}, tmp_path / "c")
    assert run("show", tmp_path / "c") == 0
    assert "t = (1, 2)" in capsys.readouterr().out


def test_rows_are_not_wrapped_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save({"w" * 120: torch.ones(2)}, tmp_path / "c")
    assert run("show", tmp_path / "c") == 0
    assert any("w" * 120 in line and "F32" in line for line in capsys.readouterr().out.splitlines())


def test_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", saved) == 0
    text = capsys.readouterr().out
    assert "2 tensors, 204 B in 2 files, saved by 2 ranks" in text
    assert "meta: {'step': 7}" in text
    assert "DTensor [Shard(dim=0)] on mesh (0=2)" in text
    assert text.count("rank 0") == 1
    assert "step = 7" in text
    assert "seed = 2 variants" in text
    assert run("show", saved, "b*") == 0
    text = capsys.readouterr().out
    assert "step = 7" not in text
    assert "\nw " not in text


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", saved) == 0
    assert "bytes are as they were written" in capsys.readouterr().out
    for number, path in enumerate(sorted(saved.glob("*.safetensors"))):
        data = bytearray(path.read_bytes())
        data[20 if number else -3] ^= 1
        path.write_bytes(data)
    assert run("verify", saved) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "the header is damaged" in lines[0]
    assert "tensor 'w'" in lines[1] or "tensor 'b'" in lines[1]


def test_verify_tells_missing_and_foreign_files(saved: Path) -> None:
    first, second = sorted(saved.glob("*.safetensors"))
    first.write_bytes(second.read_bytes())
    second.unlink()
    problems = checkpoint.verify(saved)
    assert any("No such file" in problem for problem in problems)
    assert len(problems) >= 2


def test_diff(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    w = numbers(8, 6)
    w[0, 0], w[3, 3] = -5, float("nan")
    state = {"w": w, "b": numbers(4), "step": 8, "seed": 0, "more": torch.ones(1)}
    checkpoint.save(state, other)
    assert run("diff", saved, saved) == 0
    assert run("diff", saved, other) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "w: 2 of 48 elements differ, by at most 5",
        "b: F32[3] in the first, F32[4] in the second",
        "more: only in the second",
        "step: 7 and 8",
        "seed@0: only in the first",
        "seed@1: only in the first",
        "seed: only in the second",
    ]


def test_the_same_values_in_other_layouts_do_not_differ(saved: Path, tmp_path: Path) -> None:
    checkpoint.save({"w": numbers(8, 6), "b": numbers(3), "step": 7}, tmp_path / "other")
    names = {each.name for each in checkpoint.diff(saved, tmp_path / "other")}
    assert names == {"seed@0", "seed@1"}


def test_convert(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "w.safetensors"
    assert run("convert", saved, target, "--names", "w", "--file-bytes", "5G") == 0
    assert target.exists()


def test_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", tmp_path) == 2
    assert "is not a checkpoint: it has no index.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("convert", tmp_path, tmp_path, "--file-bytes", "many")
    assert "a number of bytes, such as 500M or 5G, got 'many'" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        checkpoint.verify(tmp_path)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["show", "--help"]):
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == 0
        assert "usage: tilework checkpoint" in capsys.readouterr().out
