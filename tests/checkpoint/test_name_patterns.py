"""Patterns of names, alone and in each function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tables import each
from tilework import checkpoint
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.errors import CheckpointError
from tilework.testing import run_ranks


def test_none_takes_every_name() -> None:
    patterns = NamePatterns(None)
    assert patterns.takes_all
    assert patterns.match("anything")
    patterns.check()


def test_a_pattern_serves_if_any_name_matches() -> None:
    patterns = NamePatterns("a.*")
    assert not patterns.takes_all
    assert [patterns.match(name) for name in ("a.b", "A.b", "a")] == [True, False, False]
    patterns.check()


@each(
    ("pattern", "names", "hint"),
    [
        ("modle.weight", ["model.weight", "step"], "did you mean model.weight"),
        ("z", ["a1", "b2"], "there are a1, b2$"),
        ("z", list("abcdefg"), "there are a, b, c, d, e, …"),
        ("z", [], "there are none"),
    ],
)
def test_a_pattern_without_names_is_refused(pattern: str, names: list[str], hint: str) -> None:
    patterns = NamePatterns(["*", pattern] if names else pattern)
    assert all(map(patterns.match, names))
    with pytest.raises(CheckpointError, match=f"no name matches '{pattern}': {hint}"):
        patterns.check()


STATE = {"model": {"weight": torch.ones(2)}, "step": 3}
USES: list[Callable[[Path], Any]] = [
    lambda path: checkpoint.read(path, ["step", "optimizer.*"]),
    lambda path: checkpoint.load(path, STATE, names=["step", "optimizer.*"]),
    lambda path: checkpoint.show(path, ["model.*", "optimizer.*"]),
    lambda path: checkpoint.convert(
        path, path.with_name("other"), "tilework", checkpoint.ConvertOptions(["optimizer.*"])
    ),
]


@pytest.mark.parametrize("use", USES)
def test_every_function_refuses_what_matches_nothing(
    use: Callable[[Path], Any], tmp_path: Path
) -> None:
    checkpoint.save(STATE, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"no name matches 'optimizer\.\*'"):
        use(tmp_path / "saved")
    assert not (tmp_path / "other").exists()


def test_a_pattern_may_serve_one_rank_alone(tmp_path: Path) -> None:
    def program(rank: int) -> torch.Tensor:
        checkpoint.save({f"stage{rank}": torch.full((2,), rank + 1.0)}, tmp_path / "saved")
        state = {f"stage{rank}": torch.zeros(2)}
        checkpoint.load(tmp_path / "saved", state, names="stage1")
        with pytest.raises(CheckpointError, match="no name matches 'stage7'"):
            checkpoint.load(tmp_path / "saved", state, names=["stage1", "stage7"])
        return state[f"stage{rank}"]

    assert [kept.tolist() for kept in run_ranks(2, program)] == [[0.0, 0.0], [2.0, 2.0]]
