"""Paths of checkpoints, and the storages there."""

from __future__ import annotations

import os

from tilework.checkpoint.storage import LocalStorage, Storage, is_url, plain_path
from tilework.checkpoint.url_storage import UrlStorage

#: A folder, or a URL for fsspec.
AnyPath = str | os.PathLike[str]


def storage_at(path: AnyPath | Storage) -> Storage:
    """The storage that a path names, a folder or a URL; or the storage that is given.

    Raises:
        ValueError: The path is empty, as from an unset variable; or it is a ``file://`` URL that
            names a host.
        TypeError: It is not a path.
    """
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
