"""torch.distributed.checkpoint: saved by some ranks, loaded by another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.jobs import Launcher, Rank
from tilework import dtensor as tilework_dtensor
from tilework.mesh import DeviceMesh
from tilework.sharded import ChunkShardingSpec, shard_tensor

checkpoint: Any = torch.distributed.checkpoint
VALUES = torch.arange(42.0).reshape(7, 6)


def sharded(rank: Rank, dim: int, values: torch.Tensor) -> dict[str, DTensor | int]:
    mesh = init_device_mesh("cpu", (rank.size,))
    return {"weight": distribute_tensor(values, mesh, [Shard(dim)]), "step": 3}


def save(rank: Rank, folder: Path) -> None:
    with rank.joined():
        checkpoint.save(sharded(rank, 0, VALUES), checkpoint_id=folder / "now")
        later = checkpoint.async_save(
            sharded(rank, 0, VALUES + 1),
            checkpoint_id=folder / "later",
            process_group=dist.new_group(),  # its thread must not call in between the program's
        )
        x = torch.ones(1)
        dist.all_reduce(x)  # while it saves
        assert x.item() == rank.size
        later.result()


def load(rank: Rank, folder: Path) -> list[list[list[float]]]:
    found = []
    with rank.joined():
        for name in ("now", "later"):
            state = sharded(rank, 1, torch.zeros_like(VALUES))
            checkpoint.load(state, checkpoint_id=folder / name)
            assert state["step"] == 3
            weight = state["weight"]
            assert isinstance(weight, DTensor)
            found.append(weight.full_tensor().tolist())
        model = nn.Linear(2, 2)
        assert set(get_model_state_dict(model)) == {"weight", "bias"}
    return found


def test_saved_by_three_loaded_by_two(ranks: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ranks(3, save, folder)
    for now, later in ranks(2, load, folder):
        assert now == VALUES.tolist()
        assert later == (VALUES + 1).tolist()


def tileworks(rank: Rank, dim: int, values: torch.Tensor) -> dict[str, Any]:
    mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (rank.size,)))
    numbers = [f"rank:{number}/cpu" for number in range(rank.size)]
    return {
        "cut": tilework_dtensor.distribute_tensor(values, mesh, [tilework_dtensor.Shard(dim)]),
        "copies": tilework_dtensor.distribute_tensor(values[0], mesh),
        "few": tilework_dtensor.distribute_tensor(values[0, :1], mesh, [tilework_dtensor.Shard(0)]),
        "rows": shard_tensor(values, ChunkShardingSpec(0, list(numbers))),
    }


def save_tileworks(rank: Rank, folder: Path) -> None:
    with rank.joined():
        checkpoint.save(tileworks(rank, 0, VALUES), checkpoint_id=folder)


def load_tileworks(rank: Rank, folder: Path) -> None:
    with rank.joined():
        state = tileworks(rank, 1, torch.zeros_like(VALUES))
        checkpoint.load(state, checkpoint_id=folder)
        assert state["cut"].full_tensor().equal(VALUES)
        assert state["copies"].full_tensor().equal(VALUES[0])
        assert state["few"].full_tensor().equal(VALUES[0, :1])
        assert state["rows"].full_tensor().equal(VALUES)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_programs_save_and_load_tileworks_tensors(ranks: Launcher, tmp_path: Path) -> None:
    ranks(3, save_tileworks, tmp_path / "saved")
    ranks(2, load_tileworks, tmp_path / "saved")
    plain = {"cut": torch.zeros_like(VALUES), "few": torch.zeros(1)}
    checkpoint.load(plain, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert plain["cut"].equal(VALUES)
