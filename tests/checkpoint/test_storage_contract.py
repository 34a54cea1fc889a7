"""All storages of checkpoints keep the contract that ``tilework.testing.storages`` states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilework.checkpoint import CheckpointManager, FileReader, FileWriter, Storage
from tilework.checkpoint.storage import LinkedStorage, LocalStorage
from tilework.checkpoint.url_storage import UrlStorage
from tilework.errors import CheckpointError
from tilework.testing.storages import StorageContract


class TestLocal(StorageContract):
    def storage(self, folder: Path) -> Storage:
        return LocalStorage(folder / "run" / "1")


class TestLinked(StorageContract):
    def storage(self, folder: Path) -> Storage:
        return LinkedStorage(folder / "run")


class TestUrl(StorageContract):
    def storage(self, folder: Path) -> Storage:
        pytest.importorskip("fsspec")
        return UrlStorage(f"memory://{folder}/run")


class TestInPlace(StorageContract):
    def storage(self, folder: Path) -> Storage:
        pytest.importorskip("fsspec")
        from tests.checkpoint.test_url_storage import InPlace

        return UrlStorage(f"{InPlace.protocol}://{folder}/run")


class Kept(Storage):
    """Files in a dict, as a plug-in of a user may keep them."""

    is_local = False

    def __init__(self, location: str, files: dict[str, bytes]) -> None:
        self.location, self._files = location, files

    def prepare(self) -> None:
        pass

    def create(self, name: str) -> FileWriter:
        return _Writer(self._files, self.where(name))

    def open(self, name: str) -> FileReader:
        if self.where(name) not in self._files:
            raise CheckpointError(f"no file {name}", file=name)
        return _Reader(self._files[self.where(name)])

    def names(self) -> list[str]:
        start = f"{self.location}/"
        inside = (path[len(start) :] for path in self._files if path.startswith(start))
        return sorted({path.partition("/")[0] for path in inside})

    def remove(self, name: str) -> None:
        self._files.pop(self.where(name), None)

    def wait_for_room(self) -> None:
        pass

    def forget(self, name: str) -> None:
        pass

    def sync(self) -> None:
        pass

    def inner(self, name: str) -> Storage:
        return Kept(self.where(name), self._files)

    def remove_folder(self) -> None:
        for name in self.names():
            self.remove(name)


class _Writer(FileWriter):
    def __init__(self, files: dict[str, bytes], path: str) -> None:
        self._files, self._path, self._parts = files, path, list[bytes]()

    def write(self, memory: memoryview | bytes) -> None:
        self._parts.append(bytes(memory))

    def finish(self) -> None:
        self._files[self._path] = b"".join(self._parts)

    def discard(self) -> None:
        pass


class _Reader(FileReader):
    def __init__(self, content: bytes) -> None:
        self._content, self.nbytes = content, len(content)

    def read_into(self, memory: memoryview, offset: int) -> int:
        part = self._content[offset : offset + memory.nbytes]
        memory[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


_FILES: dict[str, bytes] = {}


class TestOfAUser(StorageContract):
    def storage(self, folder: Path) -> Storage:
        return Kept(str(folder), _FILES)


def test_a_manager_keeps_checkpoints_in_a_storage() -> None:
    manager = CheckpointManager(Kept("run", _FILES), keep=2)
    state = {"n": 0}
    for step in (1, 2, 3):
        manager.save(step, {"n": step})
    assert [kept.step for kept in manager.all()] == [2, 3]
    assert manager.resume(into=state) == 3
    assert state == {"n": 3}
