"""examples/digits.py: its flags and parts, and small trainings as a user runs them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.examples.scripts import FOLDER, check_refused, load, options_of, run
from tilework.testing import run_ranks

# Imports of the packages take seconds: only tests that run do them.
pytestmark = pytest.mark.skipif(
    not (find_spec("sklearn") and find_spec("matplotlib")),
    reason="scikit-learn and matplotlib are in the extras dev and examples",
)

SCRIPT = FOLDER / "digits.py"
EXAMPLE = load(SCRIPT)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:  # a function of flags, gives Options
    return options_of(EXAMPLE, monkeypatch)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--epochs 0", "argument --epochs: expected a whole number of at least 1, got '0'"),
        ("--ranks 40", "--ranks 40 with --batch 16: there are images for a few batches of 22"),
        ("--batch 1000 --ranks 2", "for a few batches of 1 ranks only"),
        ("--plot digits.gif", "--plot digits.gif: the name of a picture ends in .svg or .png"),
        ("--plot nowhere/digits.svg", "--plot nowhere/digits.svg: there is no folder"),
    ],
)
def test_a_wrong_flag_gets_one_clear_error(
    options: Any, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    check_refused(options, capsys, flags, message)


def test_a_missing_package_is_named_with_the_command(
    options: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXAMPLE, "NEEDED", {"not_installed": "its-name", "json": "json"})
    with pytest.raises(SystemExit):
        options()
    wanted = f"this example needs its-name: {sys.executable} -m pip install its-name"
    assert wanted in capsys.readouterr().err


def test_the_launcher_decides_the_number_of_ranks(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert options().ranks == 3
    with pytest.raises(SystemExit):
        options("--ranks", "2")
    assert "--ranks 2, but the launcher started 3" in capsys.readouterr().err


def test_every_image_is_of_one_rank_and_rank_0_has_the_most() -> None:
    for ranks in range(1, 9):
        shares = EXAMPLE.own_images(1437, ranks)
        assert torch.equal(torch.cat(shares), torch.arange(1437))
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == ranks
    assert [len(share) for share in EXAMPLE.own_images(1437, 4)] == [442, 387, 331, 277]


def test_the_numbers_of_ranks() -> None:
    assert [EXAMPLE.sizes_up_to(n) for n in (1, 2, 3, 4, 6)] == [
        *([1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6])
    ]


def test_ranks_with_other_numbers_of_images_train_as_one_process(options: Any) -> None:
    asked = options("--epochs", "2", "--check")
    train, test = EXAMPLE.load_digits(asked)
    few = EXAMPLE.Digits(train.images[:190], train.labels[:190])
    alone = list(EXAMPLE.train_alone(few, asked, 3))

    def program(rank: int) -> list[float]:
        group = dist.get_default_group()
        curve, _ = EXAMPLE.train(few, test, asked, group)
        assert curve.images == [76, 63, 51]
        return list(curve.losses)

    for losses in run_ranks(3, program):
        assert losses == pytest.approx(alone, rel=1e-9)
    assert len(alone) == 2 * 5  # the batches of rank 0, in two epochs


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    launch = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", "2"]
    flags = ["--epochs", "1", "--batch", "48", "--check", "--plot", str(plot)]
    done = run(*launch, str(SCRIPT), *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == ["ranks", "steps", "accuracy", "steps_to_good", "plot", "max_rel_diff"]
    assert result["ranks"] == [1, 2]
    assert result["steps"] == [30, 18]
    assert min(result["accuracy"]) > 0.3
    assert result["max_rel_diff"] < 1e-9
    assert plot.read_text().startswith("<?xml")
    assert "821 616" in done.stdout
