"""Checkpoints at URLs, by way of fsspec: memory://, s3:// and whatever it has plug-ins for.

There is no rename that all stores have. What is written is complete when it is closed, and the
index is written last: without it there is no checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tilework.checkpoint.storage import FileReader, FileWriter, Storage
from tilework.errors import CheckpointError


class UrlStorage(Storage):
    """A folder at a URL.

    Args:
        url: As fsspec takes it.

    Raises:
        ImportError: fsspec, or its plug-in for the URL, is not installed.
    """

    is_local = False

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError:
            raise ImportError(
                f"the path {url!r} is a URL, which takes fsspec: pip install fsspec"
            ) from None
        self.location = url
        self._files, self._folder = fsspec.core.url_to_fs(url)
        self._folder = self._folder.rstrip("/")

    def prepare(self) -> None:
        self._files.makedirs(self._folder, exist_ok=True)

    def create(self, name: str) -> FileWriter:
        return _UrlWriter(self._files, f"{self._folder}/{name}")

    def open(self, name: str) -> FileReader:
        return _UrlReader(self._files, f"{self._folder}/{name}", self.where(name))

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            listed = self._files.ls(self._folder, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in listed)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._folder}/{name}")

    def wait_for_room(self) -> None:
        """Nothing: a store has room."""

    def forget(self, name: str) -> None:
        """Nothing: this machine keeps nothing of the file."""

    def sync(self) -> None:
        """Nothing: a store keeps what it has accepted."""

    def inner(self, name: str) -> Storage:
        return UrlStorage(f"{self.location.rstrip('/')}/{name}")

    def remove_folder(self) -> None:
        for name in sorted(self.names(), key=lambda name: not name.endswith(".json")):
            self.remove(name)
        with suppress(OSError, NotImplementedError):  # stores of objects have no folders
            self._files.rmdir(self._folder)


class _UrlWriter(FileWriter):
    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._file = files.open(path, "wb")

    def write(self, memory: memoryview | bytes) -> None:
        self._file.write(bytes(memory))

    def finish(self) -> None:
        file, self._file = self._file, None
        file.close()

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if hasattr(file, "discard"):
                file.discard()  # an upload in parts that was not completed
                return
        except Exception:  # whatever a plug-in raises, the error on its way says more
            return
        file.close()
        self._files.rm_file(self._path)


class _UrlReader(FileReader):
    def __init__(self, files: Any, path: str, where: str) -> None:
        self._files, self._path = files, path
        try:
            info = files.info(path)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"cannot open {where}: it does not exist", file=where) from None
        if info.get("type") != "file" or info.get("islink"):
            raise CheckpointError(f"{where} is no plain file", file=where)
        self.nbytes = int(info["size"])

    def read_into(self, memory: memoryview, offset: int) -> int:
        if not memory.nbytes:
            return 0
        data: bytes = self._files.cat_file(self._path, offset, offset + memory.nbytes)
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is open."""
