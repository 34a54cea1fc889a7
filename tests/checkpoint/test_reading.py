"""Reading: its room, and files that change meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import Replicate, dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError
from tilework.checkpoint.reading import PartReader
from tilework.checkpoint.storage import FileReader
from tilework.dtensor import Shard
from tilework.testing import run_ranks

MIB = 1 << 20


def test_damage_is_found_where_the_core_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on storage that is reached by a URL."""
    checkpoint.save({"w": numbers(8, 8)}, tmp_path)
    monkeypatch.setattr("tilework.checkpoint.reading._core", None)
    assert checkpoint.read(tmp_path)["w"].equal(numbers(8, 8))
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="The file is damaged"):
        checkpoint.read(tmp_path)


def peak_mib() -> int:
    """The most memory that this process had since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_has_room_for_its_own_parts_and_a_buffer(tmp_path: Path) -> None:
    x = torch.ones(4096, 4096)  # 64 MiB

    def load(rank: int) -> list[int]:
        grown = []
        for placement in (Shard(0), Shard(1), Replicate()):
            state = {"x": dtensor(x * 2, (2,), [placement])}
            Path("/proc/self/clear_refs").write_text("5")
            before = peak_mib()
            checkpoint.load(tmp_path, into=state)
            assert float(state["x"].to_local().max()) == 1
            grown.append(peak_mib() - before)
        return grown

    run_ranks(2, lambda rank: checkpoint.save({"x": dtensor(x, (2,), [Shard(0)])}, tmp_path))
    for grown in run_ranks(2, load, kind="processes"):
        assert max(grown) < 24


def test_a_file_that_is_cut_after_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"x": numbers(MIB)}, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    real = PartReader._file

    def cut(self: PartReader, name: str) -> FileReader:
        file = real(self, name)
        if os.path.getsize(path) > 2 * MIB:
            os.truncate(path, 2 * MIB)
        return file

    monkeypatch.setattr(PartReader, "_file", cut)
    with pytest.raises(CheckpointError, match=r"ends before|has 2,097,152 bytes"):
        checkpoint.load(tmp_path, into={"x": torch.zeros(MIB)})
