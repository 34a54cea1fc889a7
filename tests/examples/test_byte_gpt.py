"""examples/byte_gpt.py: its flags and text, and small trainings as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.examples.scripts import FOLDER, load, run

SCRIPT = FOLDER / "byte_gpt.py"
SMALL = ["--steps", "4", "--batch", "6", "--context", "16", "--width", "32", "--layers", "1"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(SCRIPT)


@pytest.fixture
def options(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Any:  # a function of flags, which gives the example's Options
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def parse(*flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["byte_gpt.py", *flags])
        return example.parse_options(example.make_parser())

    return parse


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("tiles are owned by ranks; " * 40)
    return str(path)


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: expected a whole number of at least 1, got '0'"),
        ("--steps many", "argument --steps: expected a whole number of at least 1, got 'many'"),
        ("--ranks -2", "argument --ranks: expected"),
        ("--seed -1", "argument --seed: expected a whole number of at least 0, got '-1'"),
        ("--batch 1.5", "argument --batch: expected"),
        ("--context 0", "argument --context: expected"),
        ("--layers 0", "argument --layers: expected"),
        ("--width 33", "--width 33 is not a multiple of 32"),
        ("--batch 2 --ranks 3", "--batch 2 is less than one sequence for each of 3 ranks"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
    ],
)
def test_a_wrong_flag_gets_one_clear_error(
    options: Any, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(*flags.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count(message) == 1


def test_the_launcher_decides_the_number_of_ranks(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert options().ranks == 3
    with pytest.raises(SystemExit):
        options("--ranks", "2")
    assert "--ranks 2, but the launcher started 3" in capsys.readouterr().err


def test_only_rank_0_tells_of_a_wrong_flag(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        options("--steps", "0")
    assert capsys.readouterr().err == ""


# -- the text ----------------------------------------------------------------------------------


def test_text_that_is_missing(example: ModuleType, options: Any) -> None:
    with pytest.raises(ValueError, match=r"--text nowhere\.txt: no such file or folder"):
        example.load_text(options("--text", "nowhere.txt"))


def test_text_that_is_empty(example: ModuleType, options: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("empty.txt").write_text(" \n")
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(ValueError, match="there is no text in it"):
            example.load_text(options("--text", str(path)))


def test_text_that_is_too_short(example: ModuleType, options: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("short.txt").write_text("x" * 16)
    with pytest.raises(ValueError, match="16 bytes are too few for --context 16; at least 17"):
        example.load_text(options("--context", "16", "--text", str(tmp_path / "short.txt")))


def test_a_folder_is_read_in_order_without_hidden_files(
    example: ModuleType, options: Any, tmp_path: Path
) -> None:
    tmp_path.joinpath("a").mkdir()
    for name, text in {"b.txt": "second", "a/z.txt": "first", ".hidden": "never"}.items():
        tmp_path.joinpath(name).write_text(text)
    data = example.load_text(options("--context", "4", "--text", str(tmp_path)))
    assert bytes(data.tolist()) == b"first\nsecond"


def test_the_standard_library_is_several_megabytes(example: ModuleType, options: Any) -> None:
    files = example.text_files(None)
    assert sum(path.stat().st_size for path in files) > 3e6
    assert not [path for path in files if "test" in path.parts or "site-packages" in path.parts]


# -- data parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_of_all_ranks_weigh_as_much_as_the_batch(example: ModuleType, ranks: int) -> None:
    batch = torch.arange(14.0).reshape(7, 2)
    means = [
        rows.mean() * weight
        for rows, weight in (example.rows_of(batch, rank, ranks) for rank in range(ranks))
    ]
    torch.testing.assert_close(sum(means) / ranks, batch.mean())


def test_batches_do_not_depend_on_the_number_of_ranks(example: ModuleType, options: Any) -> None:
    text = torch.arange(200, dtype=torch.uint8)
    few, many = (
        list(example.batches(text, options("--steps", "3", "--ranks", ranks)))
        for ranks in ("1", "4")
    )
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


# -- as a user runs it ---------------------------------------------------------------------------


def test_ranks_that_share_rows_unevenly_train_as_one_process(text: str) -> None:
    """Without a launcher: the script starts its four ranks itself."""
    done = run(str(SCRIPT), "--ranks", "4", "--check", "--text", text, *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    keys = "ranks steps loss_first loss_last tokens_per_s comm_share max_rel_diff"
    assert list(result) == keys.split()
    assert (result["ranks"], result["steps"]) == (4, 4)
    assert result["max_rel_diff"] < 1e-4
    assert result["loss_last"] < result["loss_first"]
    assert 0 <= result["comm_share"] <= 1


def test_under_the_launcher_the_last_line_is_bare_json(text: str) -> None:
    launch = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", "2"]
    done = run(*launch, str(SCRIPT), "--text", text, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ranks"] == 2
    assert "training 4/4  loss" in done.stdout


def test_a_wrong_text_ends_it_before_any_rank_starts() -> None:
    done = run(str(SCRIPT), "--text", "nowhere.txt")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--text nowhere.txt: no such file or folder")
    assert done.stderr.count("error") == 1
