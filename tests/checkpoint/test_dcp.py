"""The storage writer of torch.distributed.checkpoint: saves that fail, in one process.

Programs of several ranks are in tests/torch_backend/test_checkpoint.py.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.planner import SavePlan

from tilework import checkpoint
from tilework.checkpoint.dcp import TileworkWriter
from tilework.checkpoint.storage import calls

dcp: Any = torch_dcp
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(value: float, path: Path) -> None:
    dcp.save({"w": torch.full((3,), value)}, storage_writer=TileworkWriter(path))


def test_a_path_is_free_again_after_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1, tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(calls), "write", staticmethod(full))
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            save(2, tmp_path)
    assert checkpoint.read(tmp_path)["w"].tolist() == [1, 1, 1]
    save(3, tmp_path)
    assert checkpoint.read(tmp_path)["w"].tolist() == [3, 3, 3]


def test_a_path_is_free_again_when_another_rank_failed(tmp_path: Path) -> None:
    writer: Any = TileworkWriter(tmp_path)
    writer.prepare_global_plan([SavePlan([])])
    with pytest.raises(dcp.CheckpointException, match="this process is writing"):
        save(1, tmp_path)
    writer.kept = writer  # as errors keep what raised them
    del writer
    save(2, tmp_path)
    assert checkpoint.read(tmp_path)["w"].tolist() == [2, 2, 2]
