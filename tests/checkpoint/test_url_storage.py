"""Checkpoints at URLs whose stores write files in place, and fail or end at any call."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, CheckpointManager, SaveOptions
from tilework.dtensor import Shard
from tilework.testing import run_ranks

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped] # noqa: E402


class InPlace(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine that are written in place, and calls that are told before."""

    protocol = "inplace"
    cachable = False
    before: Callable[[str, str], None] = staticmethod(lambda call, path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("inplace://"))
        return stripped

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = open(path, mode, buffering=0)  # noqa: SIM115
        if "w" not in mode:
            return file
        try:
            InPlace.before("open", path)
        except BaseException:
            file.close()
            raise
        return _File(file, path)

    def rm_file(self, path: str) -> None:
        InPlace.before("remove", path)
        super().rm_file(path)


class _File:
    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        InPlace.before("write", self._path)
        self._file.write(data[len(data) // 2 :])
        return len(data)

    def close(self) -> None:
        self._file.close()
        InPlace.before("close", self._path)


fsspec.register_implementation("inplace", InPlace, clobber=True)


def state(number: int) -> dict[str, Any]:
    return {"x": numbers(40, 3) + number, "number": number}


def number_at(url: str) -> int:
    found = checkpoint.read(url)
    assert found["x"].equal(state(found["number"])["x"])
    return int(found["number"])


def at_call(number: int, act: Callable[[], None]) -> Callable[[str, str], None]:
    numbers_of_calls = iter(range(10**9))

    def before(call: str, path: str) -> None:
        if next(numbers_of_calls) == number:
            act()

    return before


def message_of(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def refuse() -> None:
    raise PermissionError("the store has gone")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_store_that_fails_at_any_call_has_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"inplace://{tmp_path}/run"
    seen = []
    for number in range(30):
        checkpoint.save(state(1), url)
        with monkeypatch.context() as patched:
            patched.setattr(InPlace, "before", at_call(number, refuse))
            message = message_of(lambda: checkpoint.save(state(2), url))
        if not message:
            break
        assert "the store has gone" in message
        seen.append(number_at(url))
    assert seen == sorted(seen)
    assert seen.count(1) > 6
    checkpoint.save(state(3), url)
    assert number_at(url) == 3
    assert len(os.listdir(tmp_path / "run")) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills by signals")
def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"inplace://{tmp_path}/run"
    seen = []
    for number in range(30):
        checkpoint.save(state(1), url)
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)  # of torch's others a fork has none, and would wait for them
            InPlace.before = staticmethod(at_call(number, die))
            try:
                checkpoint.save(state(2), url)
            finally:
                os._exit(0)
        if os.WIFEXITED(os.waitpid(pid, 0)[1]):
            break
        seen.append(number_at(url))
        assert number_at(url) == seen[-1]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    checkpoint.save(state(3), url)
    assert len(os.listdir(tmp_path / "run")) == 2


def test_an_index_that_is_torn_or_gone_gives_way_to_the_one_before(tmp_path: Path) -> None:
    url = f"inplace://{tmp_path}/run"
    checkpoint.save(state(1), url)
    index = tmp_path / "run" / "index.json"
    previous = index.with_name("index.json.previous")
    previous.write_bytes(index.read_bytes())
    index.write_bytes(previous.read_bytes()[:100])
    assert number_at(url) == 1
    index.unlink()
    assert number_at(url) == 1
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        checkpoint.save(state(2), url, SaveOptions(overwrite=False))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.read(tmp_path / "run")  # a folder of this machine has no such file
    assert CheckpointManager(f"inplace://{tmp_path}").latest() is None  # no folder of a step's
    checkpoint.save(state(2), url)
    assert number_at(url) == 2


def test_what_a_plug_in_raises_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Throttled(Exception):
        """An error of no class that anybody else knows."""

    def throttle(call: str, path: str) -> None:
        if call == "write" and "rank00001" in path:
            raise Throttled("slow down")

    def program(rank: int) -> str:
        x = dtensor(numbers(8, 4), (2,), [Shard(0)])
        with pytest.raises(CheckpointError, match=r"rank 1: cannot write .*: slow down") as told:
            checkpoint.save({"x": x}, f"inplace://{tmp_path}/run")
        return str(told.value)

    monkeypatch.setattr(InPlace, "before", throttle)
    assert len(set(run_ranks(2, program))) == 1
    assert os.listdir(tmp_path / "run") == []


def test_a_url_of_files_of_this_machine_is_their_path(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    checkpoint.save(state(1), f"file://{tmp_path}/my%20run")
    checkpoint.save(state(2), f"local://{folder}")
    assert number_at(str(folder)) == 2
    assert number_at(f"file://{folder}") == 2
    with pytest.raises(ValueError, match=r"has the host 'data'.*three slashes"):
        checkpoint.save(state(1), "file://data/run")


def test_a_url_through_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot open zip://"):
        checkpoint.load(f"zip://step::{tmp_path}/none.zip", {})
