"""What several ranks of a host need of one file, by way of its pages and by messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.checkpoint.states import Replicate, dtensor, full, numbers, zeros_like
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, reading
from tilework.dtensor import Shard
from tilework.testing import run_ranks


@pytest.fixture(params=["pages", "messages", "no core"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no core":
        monkeypatch.setattr(reading, "_core", None)
    if request.param == "messages":
        monkeypatch.setattr(reading.PartReader, "shares_pages", lambda self: False)
    return str(request.param)


@pytest.mark.parametrize("verify", [True, False])
def test_columns_and_copies(tmp_path: Path, verify: bool) -> None:
    x = numbers(1500, 400)  # of two chunks and a bit

    def program(rank: int) -> int:
        checkpoint.save({"x": dtensor(x, (3,), [Shard(0)])}, tmp_path)
        total = 0
        for placement in (Shard(1), Replicate()):
            state = {"x": zeros_like(dtensor(x, (3,), [placement]))}
            total += checkpoint.load(tmp_path, into=state, verify=verify).bytes_read
            assert full(state["x"]).equal(x)
        half = {"x": zeros_like(dtensor(x.double(), (3,), [Shard(1)]))}
        checkpoint.load(tmp_path, into=half, verify=verify)  # and another dtype
        assert full(half["x"]).equal(x.double())
        return total

    assert sum(run_ranks(3, program)) == 2 * x.nbytes  # each byte once


@pytest.mark.parametrize("where", [1_500_000, 1_500_600, 1_501_200])  # in each rank's columns
def test_damage_is_told_on_all_ranks(tmp_path: Path, where: int) -> None:
    x = numbers(1500, 400)

    def program(rank: int) -> str:
        state: dict[str, Any] = {"x": zeros_like(dtensor(x, (3,), [Shard(1)]))}
        with pytest.raises(CheckpointError, match="have the CRC-32") as info:
            checkpoint.load(tmp_path, into=state)
        assert info.value.tensor == "x"
        return str(info.value)

    checkpoint.save({"x": x}, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[where] ^= 4
    path.write_bytes(content)
    messages = run_ranks(3, program)
    assert len(set(messages)) == 1
    assert path.name in messages[0]


def test_a_mesh_of_two_axes(tmp_path: Path) -> None:
    """Copies of columns: one of the ranks that have them counts for each part."""
    x = numbers(900, 512)

    def program(rank: int) -> int:
        checkpoint.save({"x": dtensor(x, (2, 2), [Shard(0), Shard(0)])}, tmp_path)
        state = {"x": zeros_like(dtensor(x, (2, 2), [Replicate(), Shard(1)]))}
        report = checkpoint.load(tmp_path, into=state)
        assert full(state["x"]).equal(x)
        return report.bytes_read

    assert sum(run_ranks(4, program)) == x.nbytes


def test_targets_of_odd_strides(tmp_path: Path) -> None:
    x = numbers(300, 400)
    checkpoint.save({"x": x}, tmp_path)
    for target in (torch.zeros(400, 300).T, torch.zeros(600, 900)[::2, 5:805:2]):
        checkpoint.load(tmp_path, into={"x": target})
        assert target.equal(x)


def test_an_error_of_any_class_on_one_rank_leaves_none_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers(1500, 400)
    checkpoint.save({"x": x}, tmp_path)
    read, get_file = reading.PartReader.read_some_chunks, reading.PartReader._file

    def broken(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("of a plug-in")
        return None

    def breaking(original: Any) -> Any:
        return lambda *arguments: (broken(), original(*arguments))[1]

    monkeypatch.setattr(reading.PartReader, "read_some_chunks", breaking(read))
    monkeypatch.setattr(reading.PartReader, "_file", breaking(get_file))
    monkeypatch.setattr(reading.PartReader, "check_sizes", lambda *arguments: None)

    def program(rank: int) -> None:
        for placement in (Shard(1), Replicate()):
            state = {"x": zeros_like(dtensor(x, (3,), [placement]))}
            with pytest.raises((ArithmeticError, RuntimeError), match="of a plug-in"):
                checkpoint.load(tmp_path, into=state)

    run_ranks(3, program)
