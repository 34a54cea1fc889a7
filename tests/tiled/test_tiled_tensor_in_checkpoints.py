"""Tensors of tilework that torch.distributed.checkpoint is given, and cannot save.

Programs that save and load are in tests/torch_backend/test_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from tilework.dtensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

dcp: Any = torch_dcp


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "problem"),
    [("shard", r"call tilework\.checkpoint\.save\(state, path\)"), ("partial", "not reduced yet")],
)
def test_what_would_be_saved_in_part_is_refused_on_all_ranks(
    kind: str, problem: str, tmp_path: Path
) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,) if kind == "shard" else (1,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        if kind == "partial":
            x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(dcp.CheckpointException, match=problem):
            dcp.save({"x": x}, checkpoint_id=tmp_path / str(rank))

    run_ranks(2 if kind == "shard" else 1, program)
    assert not list(tmp_path.glob("*/*.distcp"))
