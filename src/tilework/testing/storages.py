"""The contract of storages of checkpoints as tests: a storage is complete when it passes.

Example (a test module of a storage)::

    from tilework.testing.storages import StorageContract

    class TestMine(StorageContract):
        def storage(self, folder):
            return MyStorage(folder / "x")

Needs pytest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tilework import checkpoint
from tilework.checkpoint import CheckpointError, FileWriter, Storage
from tilework.comm.world import get_world_size
from tilework.dtensor import DeviceMesh, Shard, distribute_tensor
from tilework.testing.ranks import run_ranks


class StorageContract(ABC):
    """Tests that a storage must pass: subclass it in a test module and define :meth:`storage`."""

    @abstractmethod
    def storage(self, folder: Path) -> Storage:
        """A storage in ``folder``, which is empty; the same place for the same argument."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Storage:
        place = self.storage(tmp_path)
        place.prepare()
        return place

    def test_without_a_folder_there_are_no_names(self, tmp_path: Path) -> None:
        place = self.storage(tmp_path)
        assert place.names() == []
        place.remove("none")
        place.remove_folder()

    def test_preparing_twice_keeps_the_files(self, place: Storage) -> None:
        write(place, "a", b"1")
        place.prepare()
        assert place.names() == ["a"]

    def test_what_is_written_in_parts_is_read_whole(self, place: Storage) -> None:
        with place.create("a") as writer:
            writer.write(memoryview(b"1, "))
            writer.write(b"2")
            writer.finish()
        place.sync()
        place.forget("a")
        assert place.read_all("a") == b"1, 2"

    @pytest.mark.parametrize(
        ("offset", "count", "expected"),
        [(0, 3, b"012"), (7, 3, b"789"), (8, 5, b"89"), (10, 2, b""), (4, 0, b"")],
    )
    def test_reading_by_position(
        self, place: Storage, offset: int, count: int, expected: bytes
    ) -> None:
        write(place, "a", b"0123456789")
        reader = place.open("a")
        memory = bytearray(count)
        got = reader.read_into(memoryview(memory), offset)
        reader.close()
        reader.close()
        assert reader.nbytes == 10
        assert bytes(memory[:got]) == expected

    def test_a_file_that_is_not_finished_is_absent(self, place: Storage) -> None:
        with place.create("a") as writer:  # which discards it at the end, too
            writer.write(b"1")
            writer.discard()
        with place.create("a") as writer:
            writer.write(b"1")
        assert place.names() == []

    def test_a_file_is_replaced(self, place: Storage) -> None:
        write(place, "a", b"long before")
        write(place, "a", b"after")
        assert place.read_all("a") == b"after"
        write(place, "a", b"")
        assert place.read_all("a") == b""

    def test_removing(self, place: Storage) -> None:
        for name in ("b", "a"):
            write(place, name, b"1")
        place.remove("a")
        place.remove("a")
        place.wait_for_room()
        assert place.names() == ["b"]
        place.remove_folder()
        assert place.names() == []

    def test_a_missing_file_is_named(self, place: Storage) -> None:
        with pytest.raises(CheckpointError, match="none"):
            place.open("none")

    def test_too_large_a_file_is_refused(self, place: Storage) -> None:
        write(place, "a", b"123")
        with pytest.raises(CheckpointError, match="more than the limit of 2"):
            place.read_all("a", most_bytes=2)

    def test_an_inner_folder_has_files_of_its_own(self, place: Storage) -> None:
        inner = place.inner("b")
        inner.prepare()
        write(inner, "a", b"1")
        assert inner.names() == ["a"]
        assert place.names() == ["b"]
        assert place.inner("b").read_all("a") == b"1"

    def test_a_lock_ends(self, place: Storage) -> None:
        for _ in range(2):
            release = place.lock()
            release()
            release()

    def test_a_checkpoint_in_another_layout(self, place: Storage) -> None:
        def save(rank: int) -> None:
            checkpoint.save(_state(0), place)

        def load(rank: int) -> bool:
            state: dict[str, Any] = _state(1, torch.zeros(6, 4))
            checkpoint.load(place, into=state)
            return bool(state["x"].full_tensor().equal(_NUMBERS)) and state["n"] == 0

        run_ranks(2, save)
        assert run_ranks(3, load) == [True] * 3

    def test_a_save_that_fails_at_any_call_leaves_a_whole_checkpoint(self, place: Storage) -> None:
        seen = []
        for number in range(100):
            checkpoint.save({"x": _NUMBERS, "n": 1}, place)
            failing = _Refusing(place, number)
            with pytest.MonkeyPatch.context() as patch, suppress(CheckpointError):
                patch.setattr(place, "create", failing)
                checkpoint.save({"x": _NUMBERS + 1, "n": 2}, place)
            found = checkpoint.read(place)
            assert found["x"].equal(_NUMBERS + found["n"] - 1)
            seen.append(found["n"])
            if failing.left >= 0:  # all calls succeeded
                break
        assert seen == sorted(seen)
        assert {seen[0], seen[-1]} == {1, 2}


class _Refusing:
    """Makes a storage's writers; a call fails, as on a full disk, after ``left`` others."""

    def __init__(self, place: Storage, left: int) -> None:
        self._create, self.left = place.create, left

    def __call__(self, name: str) -> FileWriter:
        return _FailingWriter(self, self._create(name))

    def count(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(28, "no space")


class _FailingWriter(FileWriter):
    def __init__(self, storage: _Refusing, inner: FileWriter) -> None:
        self._storage, self._inner = storage, inner

    def write(self, memory: memoryview | bytes) -> None:
        self._storage.count()
        self._inner.write(memory)

    def finish(self) -> None:
        self._storage.count()
        self._inner.finish()

    def discard(self) -> None:
        self._inner.discard()


def write(place: Storage, name: str, content: bytes) -> None:
    """Write a whole file."""
    with place.create(name) as writer:
        writer.write(content)
        writer.finish()


_NUMBERS = torch.arange(24.0).view(6, 4)


def _state(dim: int, numbers: torch.Tensor = _NUMBERS) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(get_world_size())))
    return {"x": distribute_tensor(numbers, mesh, [Shard(dim)]), "n": 0}
