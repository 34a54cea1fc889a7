"""examples/sharded_embedding.py: its flags and text, and small trainings as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.scripts import FOLDER, check_refused, load, options_of, run

SCRIPT = FOLDER / "sharded_embedding.py"
SMALL = ["--steps", "6", "--batch", "20", "--width", "8", "--words", "150"]


EXAMPLE = load(SCRIPT)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:  # a function of flags, gives Options
    return options_of(EXAMPLE, monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Pairs of words that stand together; 200 different ones."""
    path = tmp_path / "text.txt"
    pairs = [f"left_{i} right_{i}" for i in range(100)]
    path.write_text("\n".join(pairs * 5))
    return str(path)


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: expected a whole number of at least 1, got '0'"),
        ("--steps 1", "--steps 1: there must be 2 to reshard in between"),
        ("--words 99", "--words 99: at least 100 are needed"),
        ("--shares 1,x", "argument --shares: expected a whole number of at least 1, got 'x'"),
        ("--shares 1,2 --fewer 3", "--fewer 3: there are only 2 ranks"),
        ("--text nowhere.txt", "--text nowhere.txt: no such file"),
    ],
)
def test_a_wrong_flag_gets_one_clear_error(
    options: Any, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    check_refused(options, capsys, flags, message)


def test_the_launcher_decides_the_number_of_ranks(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = options()
    assert (found.shares, found.fewer) == ([4, 3, 2, 1], 3)
    with pytest.raises(SystemExit):
        options("--shares", "1,1")
    assert "--shares has 2 numbers, but the launcher started 4 ranks" in capsys.readouterr().err


# -- the text and its rows -----------------------------------------------------------------------


def test_words_of_the_text(options: Any, text: str) -> None:
    found = EXAMPLE.load_text(options("--text", text, "--words", "150"))
    assert len(found.words) == 150
    assert found.frequency.sum().item() == pytest.approx(1)
    assert found.numbers.max() < 150


def test_a_text_of_too_few_words(options: Any, tmp_path: Path) -> None:
    for words in ("", "three words here"):
        tmp_path.joinpath("few.txt").write_text(words)
        with pytest.raises(ValueError, match="different words are too few"):
            EXAMPLE.load_text(options("--text", str(tmp_path / "few.txt")))


def test_words_that_stand_together(options: Any, text: str) -> None:
    parsed = options("--text", text, "--steps", "2", "--batch", "50")
    read = EXAMPLE.load_text(parsed)
    following = set(zip(read.numbers.tolist(), read.numbers[1:].tolist(), strict=False))
    for words, candidates in EXAMPLE.batches(read, parsed):
        assert words.shape == (50,)
        assert candidates.shape == (50, 1 + EXAMPLE.NEGATIVES)
        pairs = set(zip(words.tolist(), candidates[:, 0].tolist(), strict=True))
        assert pairs & following


@given(st.integers(100, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_rows_are_in_proportion_to_the_shares(n_rows: int, shares: list[int]) -> None:
    shards = EXAMPLE.row_shards(n_rows, 4, shares).shards
    rows = [shard.shard_sizes[0] for shard in shards]
    assert sum(rows) == n_rows
    for row, share in zip(rows, shares, strict=True):
        assert abs(row - n_rows * share / sum(shares)) <= 1


def test_the_model_takes_plain_tables() -> None:
    model = EXAMPLE.SkipGram(torch.ones(5, 2), torch.ones(5, 2))
    assert (
        model(torch.tensor([0, 1]), torch.tensor([[1, 2, 3], [4, 0, 1]])).tolist() == [[2] * 3] * 2
    )


# -- as a user runs it ---------------------------------------------------------------------------


def test_sharded_tables_train_as_plain_ones(text: str) -> None:
    """Without a launcher: the script starts its ranks itself."""
    flags = ["--shares", "3,2,1", "--fewer", "2", "--check", "--text", text]
    done = run(str(SCRIPT), *flags, *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    keys = "ranks steps rows rows_after loss_first loss_last words_per_s max_rel_diff"
    assert list(result) == keys.split()
    assert (result["ranks"], result["steps"]) == (3, 6)
    assert result["rows"] == [75, 50, 25]
    assert result["rows_after"] == [90, 60, 0]
    assert result["max_rel_diff"] < 1e-4
    assert result["loss_last"] < result["loss_first"]


def test_under_the_launcher(text: str) -> None:
    launch = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", "2"]
    done = run(*launch, str(SCRIPT), "--text", text, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1])["rows_after"] == [150, 0]
    assert lines[0].startswith("ShardedTensor float32[150, 8] in 2 shards on ranks 0-1")
    assert any(line.startswith("training 3/3  loss") for line in lines)
    assert any(line.split()[:3] == ["rank:1", "none", "0"] for line in lines)


def test_a_wrong_text_ends_it_before_any_rank_starts(tmp_path: Path) -> None:
    tmp_path.joinpath("short.txt").write_text("too short")
    done = run(str(SCRIPT), "--text", str(tmp_path / "short.txt"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("2 different words are too few")
