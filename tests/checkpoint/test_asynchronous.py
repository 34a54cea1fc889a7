"""Saving beside training."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.checkpoint.faulty_calls import fail_at, watched
from tests.checkpoint.states import dtensor, full, model, numbers, train
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, asynchronous
from tilework.checkpoint.tensor_bytes import lasting_bytes
from tilework.dtensor import Shard
from tilework.testing import run_ranks


def test_the_state_may_change_at_once(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        x = dtensor(numbers(8, 3), (2,), [Shard(0)])
        pending = checkpoint.async_save({"x": x, "n": [1]}, tmp_path)
        x.to_local().zero_()
        pending.wait()
        assert pending.done()
        return checkpoint.read(tmp_path)["x"].equal(numbers(8, 3))

    assert run_ranks(2, program) == [True, True]


def test_training_communicates_meanwhile(tmp_path: Path) -> None:
    """On the default group, in another order on each rank than the save's own agreements."""

    def program(rank: int) -> float:
        x = torch.ones(4)
        for step in range(4):
            checkpoint.async_save({"x": dtensor(x, (2,), [Shard(0)]), "n": step}, tmp_path)
            for _ in range(20):
                dist.all_reduce(x)
                x /= 2
        checkpoint.load(tmp_path, into=(into := {"x": torch.zeros(4), "n": 0}))
        assert into["n"] == 3
        return float(x.sum())

    assert run_ranks(2, program) == [4, 4]


def test_a_save_ends_after_the_groups_do(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        checkpoint.async_save({"x": dtensor(numbers(64, 64), (2,), [Shard(0)])}, tmp_path)
        dist.destroy_process_group()

    run_ranks(2, program)
    assert checkpoint.read(tmp_path)["x"].equal(numbers(64, 64))


def test_failures_come_with_wait_and_with_the_next_save(tmp_path: Path) -> None:
    def program(rank: int) -> list[str]:
        found = []
        with watched(fail_at(3, errno.ENOSPC)):  # of the elements' flush
            pending = checkpoint.async_save({"x": numbers(9)}, tmp_path / str(rank), group=None)
            while not pending.done():
                threading.Event().wait(0.01)
        for wait in (True, False):
            try:
                pending.wait() if wait else checkpoint.save({"x": 1}, tmp_path / "y")
            except CheckpointError as error:
                found.append(str(error))
        return found

    (messages,) = run_ranks(1, program)
    assert len(messages) == 1
    assert "No space left" in messages[0]

    def unseen(rank: int) -> None:
        with watched(fail_at(3, errno.ENOSPC)):  # of the elements' flush
            pending = checkpoint.async_save({"x": numbers(9)}, tmp_path / "z")
            while not pending.done():
                threading.Event().wait(0.01)
        with pytest.raises(CheckpointError, match="before this one has failed"):
            checkpoint.save({"x": 1}, tmp_path / "y")
        checkpoint.save({"x": 1}, tmp_path / "y")

    run_ranks(1, unseen)


def test_the_interpreter_waits(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from tilework import checkpoint;"
        "checkpoint.async_save({'x': torch.arange(1 << 20)}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=180)
    assert checkpoint.read(tmp_path)["x"].equal(torch.arange(1 << 20))


def test_resume_from_a_save_beside_training(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    state = {"m": net, "o": optimizer, "r": checkpoint.RandomState()}
    train(net, optimizer)
    checkpoint.async_save(state, tmp_path)
    train(net, optimizer, steps=2)
    expected = [p.clone() for p in net.parameters()]
    report = checkpoint.load(tmp_path, into=state)  # waits
    assert not report.unused
    train(net, optimizer, steps=2)
    assert all(map(torch.equal, expected, net.parameters()))
    assert full(net.state_dict()["0.weight"]).equal(expected[0])


@pytest.mark.parametrize("refused", [OSError(errno.ENOMEM, "no memory"), MemoryError()])
def test_a_rank_without_memory_for_its_copy_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    def memory(nbytes: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise refused
        return lasting_bytes(nbytes)

    def program(rank: int) -> tuple[str, bool]:
        x = dtensor(numbers(8, 3), (2,), [Shard(0)])
        with pytest.raises(CheckpointError) as told:
            checkpoint.async_save({"x": x}, tmp_path)
        dist.barrier()
        monkeypatch.undo()
        checkpoint.async_save({"x": x}, tmp_path).wait()
        return str(told.value), checkpoint.read(tmp_path)["x"].equal(numbers(8, 3))

    monkeypatch.setattr(asynchronous, "lasting_bytes", memory)
    ends = run_ranks(2, program)
    assert ends[0] == ends[1]
    assert re.match("rank 1: there is no memory for the copy of 64 bytes", ends[0][0])
    assert ends[0][1]


def test_a_rank_without_a_thread_to_write_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            if self.name == "checkpoint" and dist.get_rank() == 1:
                raise RuntimeError("can't start new thread")
            super().start()

    def program(rank: int) -> None:
        x = dtensor(numbers(8, 3), (2,), [Shard(0)])
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpoint.async_save({"x": x}, tmp_path)
        checkpoint.save({"x": x}, tmp_path)

    monkeypatch.setattr(threading, "Thread", NoThread)
    run_ranks(2, program)
    assert checkpoint.read(tmp_path)["x"].equal(numbers(8, 3))
