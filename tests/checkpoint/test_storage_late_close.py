"""Descriptors of removed files are closed beside the program, and a writer can wait for that."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Event
from unittest import mock

import pytest

from tilework.checkpoint.storage import LateClose, LocalStorage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors by /proc")
LARGE = 20 << 20


def is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(path))
    except FileNotFoundError:
        return False


def descriptors_of(path: Path) -> list[int]:
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd, path)]


def opened(path: Path, number: int) -> list[int]:
    (path / "x").write_bytes(b"x")
    return [os.open(path / "x", os.O_RDONLY) for _ in range(number)]


def test_wait_ends_when_all_are_closed(tmp_path: Path) -> None:
    closing = LateClose()
    closing.wait()  # for nothing
    for _ in range(3):
        for descriptor in opened(tmp_path, 100):  # more than wait for the thread
            closing.add(descriptor)
        closing.wait()
        assert not descriptors_of(tmp_path)


def test_whoever_adds_does_not_wait(tmp_path: Path) -> None:
    closing, may_close, close = LateClose(), Event(), os.close

    def slow(descriptor: int) -> None:
        assert may_close.wait(60)
        close(descriptor)

    with mock.patch.object(os, "close", slow):
        for descriptor in opened(tmp_path, 3):
            closing.add(descriptor)
        assert len(descriptors_of(tmp_path)) == 3
        may_close.set()
        closing.wait()
    assert not descriptors_of(tmp_path)


def test_without_threads_descriptors_are_closed_at_once(tmp_path: Path) -> None:
    closing = LateClose()
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        for descriptor in opened(tmp_path, 2):
            closing.add(descriptor)
    assert not descriptors_of(tmp_path)
    closing.wait()


def test_a_large_file_is_absent_as_soon_as_it_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for name, nbytes in (("large", LARGE), ("small", 5)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(nbytes)
        storage.remove(name)
        assert storage.names() == []
        storage.remove(name)  # there is none
    storage.wait_for_room()
    assert not descriptors_of(tmp_path)


def test_what_is_forgotten_can_be_read(tmp_path: Path) -> None:
    contents = os.urandom(LARGE)
    (tmp_path / "x").write_bytes(contents)
    storage = LocalStorage(tmp_path)
    storage.forget("x")
    storage.forget("y")  # there is none
    assert storage.read_all("x") == contents


def test_links_are_neither_followed_nor_kept_open(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.truncate(LARGE)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    LocalStorage(tmp_path).remove("link")
    assert os.listdir(tmp_path) == ["x"]
    assert not descriptors_of(tmp_path)
