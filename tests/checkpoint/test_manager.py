"""The checkpoints of one run."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import dtensor, full, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointManager
from tilework.checkpoint.format import INDEX_NAME
from tilework.checkpoint.manager import remove_if_left
from tilework.checkpoint.storage import LOCK_NAME, LocalStorage
from tilework.dtensor import Shard
from tilework.errors import CheckpointError
from tilework.testing import run_ranks


def steps(manager: CheckpointManager) -> list[int]:
    return [kept.step for kept in manager.all()]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=2, every=5)
    assert manager.latest() is None
    for step in range(1, 31):
        if manager.should_save(step):
            manager.save(step, {"x": numbers(3) + step})
    assert steps(manager) == [25, 30]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000025", "step-00000030"]
    assert manager.latest() == str(tmp_path / "run" / "step-00000030")


@pytest.mark.parametrize(("best", "expected"), [("loss", [2, 5]), ("max:loss", [3, 5])])
def test_the_best_one_is_kept(tmp_path: Path, best: str, expected: list[int]) -> None:
    manager = CheckpointManager(tmp_path, keep=1, best=best)
    for step, loss in enumerate([3, 1, 4, float("nan"), 2], 1):
        manager.save(step, {"x": 1}, {"loss": loss, "rate": float("inf")})
        assert manager.all()[-1].metrics == pytest.approx(
            {"loss": loss, "rate": float("inf")}, nan_ok=True
        )
    assert steps(manager) == expected
    kept = manager.best_one()
    assert kept is not None
    assert kept.step == expected[0]
    with pytest.raises(ValueError, match="'loss', which is not among"):
        manager.save(9, {"x": 1}, {"accuracy": 1})


def test_damaged_and_foreign_folders_do_not_count(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"x": numbers(9)})
    file = next((tmp_path / "step-00000003").glob("*.safetensors"))
    os.truncate(file, 10)
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000008" / "mine").touch()
    (tmp_path / "best").mkdir()
    assert manager.latest() == str(tmp_path / "step-00000002")
    manager.save(4, {"x": 1})
    assert sorted(os.listdir(tmp_path)) == [
        "best",
        *(f"step-0000000{n}" for n in (1, 2, 3, 4, 8)),
    ]


def test_what_is_no_folder_of_a_step_stays_and_disturbs_nobody(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"x": 1})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-000000021")  # not our name for 21
    (tmp_path / "step-00000009").touch()
    (tmp_path / "step-00000010").symlink_to(tmp_path / "nowhere")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "step-00000001", elsewhere)
    (tmp_path / "step-00000002").symlink_to(elsewhere)
    state = {"x": 0}
    assert manager.resume(into=state) == 2
    manager.save(3, {"x": 3})
    assert steps(manager) == [3]
    assert checkpoint.read(elsewhere) == {"x": 1}  # of a link nothing is removed but itself
    assert sorted(os.listdir(tmp_path)) == [
        *("elsewhere", "step-000000021", "step-00000003", "step-00000009", "step-00000010"),
    ]


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for wrong in (1.5, "7", None):
        with pytest.raises(TypeError, match="step must be an int"):
            manager.save(wrong, {"x": 1})  # type: ignore[arg-type]
    manager.save(torch.tensor(4), {"x": 1})  # type: ignore[arg-type]
    assert steps(manager) == [4]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resume(tmp_path: Path, asynchronous: bool) -> None:
    def train(rank: int, ranks: int, until: int) -> Any:
        manager = CheckpointManager(tmp_path, keep=2, every=2, asynchronous=asynchronous)
        x = dtensor(torch.zeros(6, 2), (ranks,), [Shard(0)])
        state = {"x": x}
        begun = manager.resume(into=state)
        for step in range((begun or 0) + 1, until + 1):
            x.to_local().add_(step)
            if manager.should_save(step):
                manager.save(step, state)
        manager.wait()
        return begun, full(x)[0, 0].item(), steps(manager)

    assert run_ranks(2, train, 2, 5) == [(None, 15, [2, 4])] * 2
    assert run_ranks(3, train, 3, 8) == [(4, 36, [6, 8])] * 3


@pytest.mark.parametrize("damage", ["cut", "missing", "index"])
def test_resume_tells_of_a_later_checkpoint_that_is_damaged(damage: str, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"x": numbers(3) + step})
    folder = tmp_path / "step-00000002"
    (data,) = folder.glob("*.safetensors")
    if damage == "cut":
        os.truncate(data, 40)
    elif damage == "missing":
        data.unlink()
    else:
        (folder / INDEX_NAME).write_text("{")
    state = {"x": numbers(3)}
    with pytest.warns(UserWarning, match=r"step-00000002.*; resuming from step 1 instead"):
        assert manager.resume(state) == 1
    assert state["x"].equal(numbers(3) + 1)
    (tmp_path / "step-00000003").mkdir()  # of a save that did not end
    for file in folder.iterdir():
        file.unlink()
    assert manager.resume(state) == 1


def test_urls(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    manager = CheckpointManager("memory://managed/run", keep=1)
    for step in (1, 2):
        manager.save(step, {"x": numbers(3) + step})
    assert steps(manager) == [2]
    state = {"x": torch.zeros(3)}
    assert manager.resume(into=state) == 2
    assert state["x"].tolist() == [2, 3, 4]


def test_a_lower_step_is_not_removed_as_soon_as_it_is_saved(tmp_path: Path) -> None:
    CheckpointManager(tmp_path, keep=1).save(100, {"x": 1})
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"x": 1})
    assert steps(manager) == [1, 100]
    manager.save(2, {"x": 1})
    assert steps(manager) == [2, 100]


def test_a_checkpoint_that_is_being_written_anew_is_not_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"x": 1})
    folder = tmp_path / "step-00000001"
    code = (
        "import sys; from tilework.checkpoint.storage import LocalStorage as Storage; "
        "Storage(sys.argv[1]).lock(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        manager.save(2, {"x": 1})
        assert steps(manager) == [1, 2]
        writer.communicate()
    manager.save(3, {"x": 1})
    assert steps(manager) == [3]


class _Ending(LocalStorage):
    """A folder whose writer ends its save just before somebody else gets the lock."""

    def lock(self) -> Callable[[], None]:
        (self.folder / INDEX_NAME).touch()
        return super().lock()


def test_a_save_that_ends_while_leftovers_are_looked_for_stays(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    assert not remove_if_left(_Ending(tmp_path))
    assert (tmp_path / INDEX_NAME).exists()


def test_a_folder_that_another_manager_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LocalStorage.lock
    removed: list[bool] = []

    def removed_before(storage: LocalStorage) -> Callable[[], None]:
        if not removed:
            removed.append(remove_if_left(LocalStorage(storage.folder)))
        return lock(storage)

    monkeypatch.setattr(LocalStorage, "lock", removed_before)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": 1})
    assert removed == [True]
    assert steps(manager) == [1]


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(CheckpointError, match=r"cannot list .*: Permission denied"):
        CheckpointManager(tmp_path).latest()


def test_numbers_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, or None, got 0"):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step must be 0 or more, got -1"):
        CheckpointManager(tmp_path).save(-1, {})
