"""torch.distributed.checkpoint: saved by some ranks, loaded by another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.jobs import Launcher, Rank
from tilework import checkpoint as tilework_checkpoint
from tilework.checkpoint.dcp import TileworkReader, TileworkWriter

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


def save_in_tileworks_format(rank: Rank, folder: Path) -> None:
    with rank.joined():
        for values in (VALUES, VALUES + 1):  # the second takes the first one's place
            state = {"m": sharded(rank, 0, values), "list": [1, {"x": torch.ones(2)}]}
            checkpoint.save(state, storage_writer=TileworkWriter(folder))


def load_from_tileworks_format(rank: Rank, folder: Path) -> list[list[float]]:
    with rank.joined():
        m = sharded(rank, 1, torch.zeros_like(VALUES))
        state = {"m": {**m, "step": 0}, "list": [0, {"x": torch.zeros(2)}]}
        checkpoint.load(state, storage_reader=TileworkReader(folder))
        found: Any = state
        assert found["m"]["step"] == 3
        assert found["list"][0] == 1
        assert found["list"][1]["x"].tolist() == [1, 1]
        full: list[list[float]] = found["m"]["weight"].full_tensor().tolist()
    return full


def test_torchs_programs_write_and_read_tileworks_format(ranks: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    ranks(3, save_in_tileworks_format, folder)
    assert len(list(folder.iterdir())) == 4  # of the second save only
    found = tilework_checkpoint.read(folder)
    assert found["m"]["weight"].equal(VALUES + 1)
    assert found["m"]["step"] == 3
    assert found["list"][1]["x"].tolist() == [1, 1]
    assert not tilework_checkpoint.verify(folder)
    for full in ranks(2, load_from_tileworks_format, folder):
        assert full == (VALUES + 1).tolist()
