"""Saving and loading in torch's form: its keywords, and the state before the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tilework import checkpoint
from tilework.testing import run_ranks

#: With torch's names of parameters, which type checkers do not know.
like_torch: Any = checkpoint


def test_torchs_names_are_taken(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "step": 3}
    like_torch.save(state, checkpoint_id=tmp_path / "a", no_dist=True, planner=None)
    like_torch.async_save(state_dict=state, checkpoint_id=tmp_path / "b").result()
    for name in ("a", "b"):
        read: dict[str, Any] = {"weight": torch.zeros(2), "step": 0}
        like_torch.load(read, checkpoint_id=tmp_path / name)
        assert read["step"] == 3
        assert read["weight"].sum() == 2


@pytest.mark.parametrize("form", ["positional", "keyword", "ours", "names"])
def test_the_state_may_come_first(tmp_path: Path, form: str) -> None:
    checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    state = {"x": torch.zeros(2)}
    if form == "positional":
        like_torch.load(state, tmp_path / "c")
    elif form == "keyword":
        like_torch.load(state_dict=state, checkpoint_id=str(tmp_path / "c"))
    elif form == "names":
        like_torch.load(state, path=tmp_path / "c", names="x")
    else:
        checkpoint.load(tmp_path / "c", state)
    assert state["x"].sum() == 2


def test_what_is_no_path_is_told_the_order() -> None:
    with pytest.raises(TypeError, match=r"got dict. In torch's order it is load\(state, path\)"):
        like_torch.load({"x": torch.zeros(2)})
    with pytest.raises(TypeError, match="both 'path' and torch's name"):
        like_torch.load("a", {}, checkpoint_id="b")


def test_plug_ins_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="'storage_writer' can only be None"):
        like_torch.save({}, checkpoint_id=tmp_path, storage_writer=object())
    with pytest.raises(ImportError, match=r"no DefaultSavePlanner.*Use load\(…, names"):
        exec("from tilework.checkpoint import DefaultSavePlanner")


def test_ranks_that_have_a_group_save_together(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with pytest.raises(NotImplementedError, match=r"'no_dist' .* got True"):
            like_torch.save({}, checkpoint_id=tmp_path, no_dist=True)

    run_ranks(1, program)
