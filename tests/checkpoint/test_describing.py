"""States of several ranks as one: copies on parallel meshes, and tensors that only look so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.states import numbers
from tilework import checkpoint
from tilework.dtensor import Replicate, Shard, distribute_tensor
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def along_tp(full: Tensor, mesh: DeviceMesh) -> Any:
    """Sharded along one axis only, so that each of several meshes has the full tensor."""
    return distribute_tensor(full, mesh["tp"], [Shard(0)])


@pytest.mark.parametrize("rows", [8, 5, 1, 0])
def test_copies_on_parallel_meshes_are_saved_once(tmp_path: Path, rows: int) -> None:
    x = numbers(rows, 300)

    def save(rank: int) -> None:
        mesh = mesh_of(2, 2)
        state = {"x": along_tp(x, mesh), "y": distribute_tensor(x, mesh["tp"], [Replicate()])}
        checkpoint.save(state, tmp_path)

    run_ranks(4, save)
    found = checkpoint.read(tmp_path)
    assert found["x"].equal(x)
    assert found["y"].equal(x)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 2 * x.nbytes + 4000

    def load(dp: int, tp: int) -> bool:
        mesh = mesh_of(dp, tp)
        state = {"x": along_tp(torch.zeros_like(x), mesh)}
        report = checkpoint.load(tmp_path, into=state, strict=False)
        return bool(state["x"].full_tensor().equal(x)) and not report.other_ranks

    for dp, tp in ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (2, 4)):
        assert all(run_ranks(dp * tp, lambda rank, dp=dp, tp=tp: load(dp, tp)))


def test_all_ranks_write_copies_in_turn(tmp_path: Path) -> None:
    x = numbers(1024, 512)
    run_ranks(4, lambda rank: checkpoint.save({"x": along_tp(x, mesh_of(2, 2))}, tmp_path))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 1000


def test_copies_that_differ_are_saved_for_each(tmp_path: Path) -> None:
    """As of a GAN of which each half of the ranks trains its own."""
    x = numbers(6, 2)

    def save(rank: int) -> None:
        own = x.clone()
        own[5] += rank // 2  # in the tile of the last rank of each mesh
        checkpoint.save({"x": along_tp(own, mesh_of(2, 2))}, tmp_path)

    def load(rank: int) -> list[float]:
        state = {"x": along_tp(torch.zeros_like(x), mesh_of(2, 2))}
        checkpoint.load(tmp_path, into=state)
        last: list[float] = state["x"].full_tensor()[5].tolist()
        return last

    run_ranks(4, save)
    assert run_ranks(4, load) == [[10, 11], [10, 11], [11, 12], [11, 12]]


def test_other_tiles_are_not_taken_for_copies(tmp_path: Path) -> None:
    x = numbers(6, 6)

    def save(rank: int) -> None:
        mesh = mesh_of(2, 2)["tp"]
        checkpoint.save({"x": distribute_tensor(x, mesh, [Shard(rank // 2)])}, tmp_path)

    run_ranks(4, save)
    found = checkpoint.read(tmp_path)["x"]
    assert all(found[rank].equal(x) for rank in range(4))


def test_conjugates_and_negatives_in_the_same_memory_are_saved_apart(tmp_path: Path) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    state = {"x": x, "conjugate": x.conj(), "imag": x.imag, "negative": x.conj().imag}
    checkpoint.save(state, tmp_path)
    found = checkpoint.read(tmp_path)
    assert all(found[name].equal(tensor) for name, tensor in state.items())


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_empty_on_a_rank_is_saved_for_each(tmp_path: Path, kind: type) -> None:
    """As a history that only the first rank keeps."""

    def program(rank: int) -> Any:
        checkpoint.save({"history": kind([0.5] if rank == 0 else [])}, tmp_path)
        states: list[Any] = [{"history": kind(each)} for each in ([], [9.0])]
        for state in states:
            checkpoint.load(tmp_path, into=state)
        return [state["history"] for state in states]

    assert run_ranks(2, program) == [[kind([0.5])] * 2, [kind()] * 2]
    assert checkpoint.read(tmp_path)["history"] == {0: kind([0.5]), 1: kind()}
