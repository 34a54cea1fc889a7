"""Saves that are cut at every step: what was there stays, or the new one is there in full."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tests.checkpoint.faulty_calls import fail_at, kill_at, killed_at, recorded, watched
from tests.checkpoint.states import dtensor, full, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, CheckpointManager, SaveOptions, storage
from tilework.checkpoint.saving import remove_leftovers
from tilework.dtensor import Shard
from tilework.errors import DistError
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills by signals")


def state(number: int) -> dict[str, Any]:
    return {"x": numbers(100, 3) + number, "y": numbers(700) * number, "number": number}


def number_at(folder: Path) -> int:
    """The number of the state that is there, if all of it is of one."""
    found = checkpoint.read(folder)
    number: int = found["number"]
    assert found["x"].equal(state(number)["x"])
    assert found["y"].equal(state(number)["y"])
    return number


def save(number: int, folder: Path) -> None:
    checkpoint.save(state(number), folder, SaveOptions(file_bytes=1500))


def test_the_order_of_calls_is_that_of_the_format(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "one"
    calls = recorded(lambda: save(1, folder))
    renamed = [name for call, name in calls if call == "rename"]
    assert renamed[-1] == "index.json.part"
    assert len(renamed) == 4
    for name in renamed:
        about = [call for call, each in calls if each == name]
        assert about[:2] == ["open", "write"]
        assert about[-3:] == ["fsync", "close", "rename"]
        assert set(about[1:-3]) == {"write"}
    ends = [at for at, (call, _) in enumerate(calls) if call == "rename"]
    folder_flushes = [at for at, call in enumerate(calls) if call == ("fsync", "one")]
    assert any(ends[-2] < at < ends[-1] for at in folder_flushes)  # before the index
    assert folder_flushes[-1] > ends[-1]  # and after it
    # A new folder's name is flushed, too.
    assert ("fsync", "new") in calls
    assert ("fsync", tmp_path.name) in calls


@pytest.mark.parametrize("exists", [True, False])
def test_ranks_that_save_to_different_folders_are_told(tmp_path: Path, exists: bool) -> None:
    def program(rank: int) -> None:
        folder = tmp_path / str(rank)
        if exists:
            folder.mkdir()
        with pytest.raises(CheckpointError, match="all ranks must save to one folder"):
            checkpoint.save(numbers(8) + rank, folder)

    run_ranks(2, program)


def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    found = []
    for number in range(100):
        save(1, tmp_path)
        if not killed_at(number, lambda: save(2, tmp_path)):
            break
        found.append(number_at(tmp_path))
        save(3, tmp_path)
        assert number_at(tmp_path) == 3
        assert len(os.listdir(tmp_path)) == 4  # three files and the index: no leftovers
    assert number > 15
    assert found == sorted(found)
    assert {1, 2} == set(found)


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number) / "x"
        if not killed_at(number, lambda folder=folder: save(1, folder)):  # type: ignore[misc]
            break
        if (folder / "index.json").exists():
            assert number_at(folder) == 1
        else:
            with pytest.raises(CheckpointError, match="is not a checkpoint"):
                checkpoint.read(folder)
    assert number > 15


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_leaves_the_old_or_the_new_one(tmp_path: Path, victim: int) -> None:
    def program(rank: int, number: int) -> None:
        new = {"x": dtensor(numbers(8, 4) + 2, (2,), [Shard(0)]), "n": 2}
        if rank == victim:
            with watched(kill_at(number)):
                checkpoint.save(new, tmp_path)
        else:
            checkpoint.save(new, tmp_path)

    def first(rank: int) -> None:
        checkpoint.save({"x": dtensor(numbers(8, 4) + 1, (2,), [Shard(0)]), "n": 1}, tmp_path)

    seen = set()
    for number in range(0, 40, 2):
        run_ranks(2, first)
        ends = run_ranks(2, program, number, kind="processes", return_exceptions=True)
        assert all(isinstance(end, DistError) for end in ends if end is not None)
        found = checkpoint.read(tmp_path)
        assert found["x"].equal(numbers(8, 4) + found["n"])
        seen.add(found["n"])
        if ends == [None, None]:
            break
    assert seen == {1, 2}
    run_ranks(2, first)
    assert len(os.listdir(tmp_path)) == 3


def test_a_full_disk_at_any_call_raises_on_all_ranks(tmp_path: Path) -> None:
    def program(rank: int, number: int) -> Any:
        new = {"x": dtensor(numbers(8, 4) + number, (2,), [Shard(0)]), "n": number}
        try:
            checkpoint.save(new, tmp_path)
        except CheckpointError as error:
            return str(error)
        return None

    run_ranks(2, program, 0)
    names = set(os.listdir(tmp_path))
    failed = 0
    for number in range(1, 60):
        with watched(fail_at(number, errno.ENOSPC)):
            messages = run_ranks(2, program, number)
        assert messages[0] == messages[1]
        found = checkpoint.read(tmp_path)
        assert found["x"].equal(numbers(8, 4) + found["n"])
        if messages[0] is None:
            assert found["n"] == number
            names = set(os.listdir(tmp_path))
            continue
        failed += 1
        assert "No space left" in messages[0]
        if found["n"] != number:  # else it failed after the index was there
            assert set(os.listdir(tmp_path)) == names
        names = set(os.listdir(tmp_path))
    assert failed > 10


def test_a_file_that_the_system_cuts(tmp_path: Path) -> None:
    save(1, tmp_path)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoint.save({"x": torch.ones(100_000)}, tmp_path)

    assert not killed_at(10**6, limited)
    assert number_at(tmp_path) == 1
    assert len(os.listdir(tmp_path)) == 4


def test_an_asynchronous_save_that_is_killed(tmp_path: Path) -> None:
    def later(number: int) -> None:
        pending = checkpoint.async_save(state(number), tmp_path, SaveOptions(file_bytes=1500))
        pending.wait()

    for number in range(2, 100, 5):
        save(1, tmp_path)
        if not killed_at(number, lambda: later(2)):
            break
        assert number_at(tmp_path) in (1, 2)
    assert number > 10


def test_a_manager_that_is_killed_has_a_latest_checkpoint(tmp_path: Path) -> None:
    def run() -> None:
        manager = CheckpointManager(tmp_path, keep=1)
        for step in (2, 3):
            manager.save(step, state(step))

    first = CheckpointManager(tmp_path, keep=1)
    for number in range(0, 200, 3):
        first.save(1, state(1))
        reached = killed_at(number, run)
        latest = first.latest()
        assert latest is not None
        assert number_at(Path(latest)) == int(latest[-8:])
        if not reached:
            break
        first.save(9, state(9))  # and removes what was left
        assert os.listdir(tmp_path) == ["step-00000009"]
        assert len(os.listdir(tmp_path / "step-00000009")) == 2
        storage.LocalStorage(tmp_path / "step-00000009").remove_folder()
    assert number > 30


def test_a_damaged_index_beside_an_unfinished_one_blocks_no_save(tmp_path: Path) -> None:
    save(1, tmp_path)
    files = {name for name in os.listdir(tmp_path) if name != "index.json"}
    text = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").write_bytes(text[: len(text) // 2])
    (tmp_path / "index.json.part").write_bytes(text[:10])
    assert remove_leftovers(storage.LocalStorage(tmp_path)) == ["index.json.part"]
    assert files < set(os.listdir(tmp_path))  # somebody may mend the index
    (tmp_path / "index.json.part").write_bytes(text[:10])
    save(2, tmp_path)
    assert number_at(tmp_path) == 2
    assert len(os.listdir(tmp_path)) == 4


def test_two_writers_of_one_path(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, Tensor]:
            return {"x": numbers(3)}

        def load_state_dict(self, state: Any) -> None: ...

    def hold(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "rename" and threading.current_thread().name == "slow":
            inside.set()
            assert go_on.wait(120)

    with watched(hold):
        thread = threading.Thread(target=lambda: checkpoint.save(Slow(), tmp_path), name="slow")
        thread.start()
        assert inside.wait(120)
        with pytest.raises(CheckpointError, match="this process is writing to"):
            save(1, tmp_path)

        def other() -> None:
            storage._held.clear()  # another process would not have it
            with pytest.raises(CheckpointError, match="another process is writing to"):
                save(1, tmp_path)

        assert not killed_at(10**6, other)
        go_on.set()
        thread.join()
    assert list(checkpoint.read(tmp_path)) == ["x"]
    save(1, tmp_path)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.safetensors").write_text("mine")
    save(1, tmp_path)
    save(2, tmp_path)
    assert {"notes.txt", "other.safetensors"} < set(os.listdir(tmp_path))


def test_a_rank_without_anything_to_write(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        x = dtensor(numbers(1, 2), (3,), [Shard(0)])
        checkpoint.save({"x": x}, tmp_path)
        into = {"x": dtensor(torch.zeros(1, 2), (3,), [Shard(1)])}
        checkpoint.load(tmp_path, into=into)
        assert dist.get_world_size() == 3
        return full(into["x"]).tolist()

    assert run_ranks(3, program) == [[[0, 1]]] * 3
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
