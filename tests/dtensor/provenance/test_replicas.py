"""Local tensors that are to be the same along one axis of a mesh, and differ along another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.dtensor.sharded_values import cut
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    verifying,
)
from tilework.dtensor.provenance.replicas import first_replicas
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks


def _all_raise(program: Any, shape: tuple[int, ...], match: str) -> None:
    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        with pytest.raises(dist.CollectiveMismatchError, match=match):
            program(rank, mesh)

    run_ranks(torch.Size(shape).numel(), attempt)


@each(
    ("shape", "placements"),
    [
        ((2, 2), [Shard(0), Replicate()]),
        ((2, 2), [Replicate(), Shard(1)]),
        ((2, 1, 2), [Shard(0), Shard(0), Replicate()]),
    ],
)
def test_values_that_differ_along_an_axis_that_replicates(
    shape: tuple[int, ...], placements: list[Placement]
) -> None:
    """Though no collective that follows has both ranks in its group."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = torch.full((2, 2), float(rank))
        return DTensor.from_local(x, mesh, placements).full_tensor()

    _all_raise(program, shape, "are to have the same part")


def test_rows_of_each_group_of_ranks() -> None:
    """Differences along axes that shard, or that hold terms, are none."""

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2))
        row = torch.full((1,), float(rank // 2))
        rows = DTensor.from_local(row, mesh, [Shard(0), Replicate()])
        term = torch.full((1,), float(rank))
        terms = DTensor.from_local(term, mesh, [Shard(0), Partial()])
        shards = DTensor.from_local(term, mesh, [Shard(0), Shard(0)])
        return [*rows.full_tensor().tolist(), *(terms.full_tensor() + shards.sum()).tolist()]

    assert run_ranks(4, program) == [[0.0, 1.0, 7.0, 11.0]] * 4


def test_an_input_fn_that_takes_the_ranks_own_rows() -> None:
    def rows(module: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Shard(0), Replicate()])

    def program(rank: int, mesh: DeviceMesh) -> Any:
        model = distribute_module(torch.nn.Linear(2, 2), mesh, input_fn=rows)
        model(torch.full((3, 2), float(rank // 2)))
        return model(torch.full((3, 2), float(rank)))

    _all_raise(program, (2, 2), "ranks 0 and 1 are to have the same part")


def test_off_compares_nothing_and_a_rank_outside_is_not_asked() -> None:
    def program(rank: int) -> int:
        mesh = init_device_mesh("cpu", (3, 2))
        x = torch.full((1,), float(rank))
        with verifying("off"):
            DTensor.from_local(x, mesh, [Shard(0), Replicate()])
        half = DeviceMesh("cpu", [[0, 1], [2, 3]])
        y = DTensor.from_local(x * 0, half, [Shard(0), Replicate()])
        return y.to_local().numel()

    assert run_ranks(6, program) == [1] * 4 + [0] * 2


def test_the_first_rank_with_each_part() -> None:
    def program(rank: int) -> list[tuple[int, ...]]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.zeros(4, 4)
        layouts: list[list[Placement]] = [
            [Shard(0), Replicate()],
            [Replicate(), Shard(1)],
            [Shard(0), Partial()],
        ]
        return [first_replicas(cut(x, mesh, layout)._spec) for layout in layouts]

    assert run_ranks(4, program)[0] == [(0, 0, 2, 2), (0, 1, 0, 1), (0, 1, 2, 3)]


@each("makes_plain", [False, True])
def test_a_plain_loss_of_each_rank_counts_in_gradients_of_shards(makes_plain: bool) -> None:
    def program(rank: int) -> None:
        scale: Any = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        loss = torch.tensor(1.0 + rank) * (-scale.requires_grad_()[0]).exp()
        (loss.full_tensor() if makes_plain else loss).backward()
        with pytest.raises(dist.CollectiveMismatchError, match="how their tensors came about"):
            scale.grad.full_tensor()

    run_ranks(2, program)


def test_a_gradient_that_one_rank_only_looks_at_parts_nobody() -> None:
    def program(rank: int) -> None:
        weight: Any = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        full = weight.requires_grad_().full_tensor()
        if rank == 0:
            (seen,) = torch.autograd.grad(full.square().sum(), full)
            assert seen.eq(2).all()
        weight.full_tensor().sum().backward()
        assert weight.grad is not None
        assert weight.grad.full_tensor().eq(1).all()

    run_ranks(2, program)
