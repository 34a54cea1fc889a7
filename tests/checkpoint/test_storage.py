"""Files and locks of this machine, on disks that refuse calls."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.faulty_calls import watched
from tests.checkpoint.states import dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, storage
from tilework.checkpoint.storage import LateClose, LocalStorage
from tilework.dtensor import Shard
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at descriptors in /proc")


def refused(number: int, name: str, args: tuple[Any, ...]) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_lock_ends_on_a_disk_that_became_read_only(tmp_path: Path) -> None:
    release = LocalStorage(tmp_path).lock()
    before = descriptors()
    with watched(refused):
        release()
    assert (tmp_path / ".lock").exists()
    LocalStorage(tmp_path).lock()()
    assert descriptors() <= before


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_disk_that_becomes_read_only_raises_on_all_ranks(tmp_path: Path, call: str) -> None:
    def program(rank: int, number: int) -> str:
        new = {"x": dtensor(numbers(8, 4) + number, (2,), [Shard(0)]), "n": number}
        try:
            checkpoint.save(new, tmp_path)
        except CheckpointError as error:
            return str(error)
        return ""

    def from_then_on(number: int, name: str, args: tuple[Any, ...]) -> None:
        begun.extend([call] if name == call else [])
        if begun and name != "close":
            refused(number, name, args)

    begun: list[str] = []
    run_ranks(2, program, 1)
    before = descriptors()
    with watched(from_then_on):
        messages = run_ranks(2, program, 2)
    assert messages[0] == messages[1]
    assert "Read-only file system" in messages[0]
    assert checkpoint.read(tmp_path)["n"] == 1
    assert descriptors() <= before
    assert run_ranks(2, program, 3) == ["", ""]


def test_a_reader_whose_close_fails_raises_on_no_rank(tmp_path: Path) -> None:
    checkpoint.save({"x": numbers(8, 4)}, tmp_path)

    def fails(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "close":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def program(rank: int) -> bool:
        state = {"x": dtensor(torch.zeros(8, 4), (2,), [Shard(1)])}
        checkpoint.load(tmp_path, into=state)
        return bool(state["x"].full_tensor().equal(numbers(8, 4)))

    with watched(fails):
        assert run_ranks(2, program) == [True, True]


def test_a_disk_that_cannot_be_read_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"x": numbers(8, 4)}, tmp_path)

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage.calls, "preadv", fails)
    for work in (checkpoint.read, checkpoint.index_of, checkpoint.verify, checkpoint.show):
        with pytest.raises(CheckpointError, match=r"index\.json: Input/output error"):
            work(tmp_path)


def test_late_close_goes_on_when_a_close_fails() -> None:
    late, other = LateClose(), os.open(os.devnull, os.O_RDONLY)
    late.add(1 << 20)  # no descriptor
    late.add(other)
    late.wait()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
