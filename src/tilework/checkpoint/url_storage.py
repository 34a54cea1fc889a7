"""Checkpoints at URLs, through fsspec: memory://, s3:// and all of fsspec's plug-ins.

Many stores write files in place: ``index_file`` keeps the old index until the new file is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tilework.checkpoint.storage import (
    FileReader,
    FileWriter,
    LocalStorage,
    Storage,
    is_url,
    plain_path,
    removal_order,
)
from tilework.errors import CheckpointError

_MISSING = (FileNotFoundError, NotADirectoryError)


class UrlStorage(Storage):
    """A folder at a URL that fsspec accepts."""

    is_local = False
    writes_in_place = True

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError:
            raise ImportError(
                f"the path {url!r} is a URL, which takes fsspec: pip install fsspec"
            ) from None
        self.location = url
        try:
            self._files, self._folder = fsspec.core.url_to_fs(url)
        except _MISSING as error:  # for example, the archive of a zip:// URL
            raise CheckpointError(f"cannot open {url}: {error}", file=url) from None
        self._folder = self._folder.rstrip("/")

    def prepare(self) -> None:
        with _told(f"cannot make {self.location}", self.location):
            self._files.makedirs(self._folder, exist_ok=True)

    def create(self, name: str) -> FileWriter:
        return _UrlWriter(self._files, f"{self._folder}/{name}", self.where(name))

    def open(self, name: str) -> FileReader:
        return _UrlReader(self._files, f"{self._folder}/{name}", self.where(name))

    def names(self) -> list[str]:
        with _told(f"cannot list {self.location}", self.location):
            self._files.invalidate_cache()
            try:
                listed = self._files.ls(self._folder, detail=False)
            except _MISSING:
                return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in listed)

    def remove(self, name: str) -> None:
        where = self.where(name)
        with _told(f"cannot remove {where}", where), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._folder}/{name}")

    def inner(self, name: str) -> Storage:
        return UrlStorage(self.where(name))

    def remove_folder(self) -> None:
        for name in sorted(self.names(), key=removal_order):
            self.remove(name)
        with suppress(OSError, NotImplementedError):  # object stores have no folders
            self._files.rmdir(self._folder)


@contextmanager
def _told(problem: str, where: str) -> Iterator[None]:
    """Turn errors of a plug-in into a CheckpointError, except that a file is missing."""
    try:
        yield
    except (CheckpointError, *_MISSING):
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{problem}: {reason}", file=where) from error


class _UrlWriter(FileWriter):
    def __init__(self, files: Any, path: str, where: str) -> None:
        self._files, self._path, self._where = files, path, where
        with self._told():
            self._file = files.open(path, "wb")

    def _told(self) -> Any:
        return _told(f"cannot write {self._where}", self._where)

    def write(self, memory: memoryview | bytes) -> None:
        data = bytes(memory)
        with self._told():
            if self._file.write(data) not in (None, len(data)):
                raise OSError("the store took a part of what was to be written")

    def finish(self) -> None:
        with self._told():
            self._file.close()
        self._file = None

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        # Whatever a plug-in raises, the error being raised says more.
        with suppress(Exception):
            file.discard()  # an incomplete upload in parts
            file.closed = True  # else its destructor would complete it
        with suppress(Exception):
            file.close()
        with suppress(Exception):
            self._files.rm_file(self._path)


class _UrlReader(FileReader):
    def __init__(self, files: Any, path: str, where: str) -> None:
        self._files, self._path, self._where = files, path, where
        try:
            with _told(f"cannot open {where}", where):
                info = files.info(path)
                self.nbytes = int(info.get("size") or 0)
        except _MISSING:
            raise CheckpointError(f"cannot open {where}: it does not exist", file=where) from None
        if info.get("type") != "file" or info.get("islink"):
            raise CheckpointError(f"{where} is not a plain file", file=where)

    def read_into(self, memory: memoryview, offset: int) -> int:
        if not memory.nbytes:
            return 0
        try:
            with _told(f"cannot read {self._where}", self._where):
                data: bytes = self._files.cat_file(self._path, offset, offset + memory.nbytes)
                memory[: len(data)] = data
        except _MISSING:
            raise CheckpointError(
                f"cannot read {self._where}: it was removed meanwhile", file=self._where
            ) from None
        return len(data)

    def close(self) -> None:
        """Do nothing: nothing is open."""


AnyPath = str | os.PathLike[str]


def storage_at(path: AnyPath | Storage) -> Storage:
    """The storage that a path names, a folder or a URL; or the storage that is given."""
    if isinstance(path, Storage):
        return path
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the path of a checkpoint must be a str or a Path, got {type(path).__name__}: the "
            f"path comes second in save(state, path), and first in load(path, into)"
        )
    if path == "":
        raise ValueError("the path is empty: give a folder; the current folder is '.'")
    return UrlStorage(str(path)) if is_url(path) else LocalStorage(plain_path(path))
