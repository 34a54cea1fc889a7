"""Clipping of gradients on meshes of different ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.rounding import assert_close
from tilework.dtensor import (
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.mesh import DeviceMesh
from tilework.parallel import clip_grad_norm_
from tilework.testing import run_ranks


def on(mesh: DeviceMesh | None, gradient: float, backward: bool = True) -> nn.Parameter:
    """A parameter of four elements, whose gradient has a value in each."""
    full = torch.ones(4)
    made = nn.Parameter(full if mesh is None else distribute_tensor(full, mesh, [Shard(0)]))
    if backward:
        (made.sum() * gradient).backward()  # type: ignore[no-untyped-call]
    else:
        made.grad = torch.full_like(made, gradient)
    return made


def local_gradient(parameter: nn.Parameter) -> list[float]:
    grad: Any = parameter.grad
    if grad is None:
        return []
    values: list[float] = (grad.to_local() if isinstance(grad, DTensor) else grad).tolist()
    return values


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("world", [4, 5])
def test_stages_on_other_ranks_have_one_norm(backward: bool, world: int) -> None:
    def program(rank: int) -> tuple[float, list[float]]:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
        if rank == 4:
            return 10.0, [0.3, 0.3]  # as it is outside both, it need not call
        stages = [on(mesh, g, backward) for mesh, g in zip(meshes, (3.0, 4.0), strict=True)]
        total = clip_grad_norm_(stages, 1.0).item()
        return total, local_gradient(stages[rank // 2])

    for rank, (total, local) in enumerate(run_ranks(world, program)):
        assert total == 10
        assert_close(torch.tensor(local), torch.full((2,), 0.4 if rank in (2, 3) else 0.3))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_one_stage_beside_what_all_have(norm_type: float) -> None:
    def program(rank: int) -> tuple[float, list[float]]:
        whole, stage = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [1, 2])
        params = [on(None, 3.0), on(whole, 3.0), on(stage, 4.0)]
        total = clip_grad_norm_(params, 1.0, norm_type).item()
        return total, local_gradient(params[0])

    expected = torch.tensor([3.0] * 8 + [4.0] * 4).norm(norm_type).item()
    for total, local in run_ranks(3, program):
        assert total == pytest.approx(expected)
        assert local == pytest.approx([3 / expected] * 4)


def test_parts_of_a_mesh_are_each_rank_s_own() -> None:
    """Replicas of a tensor-parallel part are no stages: they count once."""

    def program(rank: int) -> float:
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        weight = nn.Parameter(distribute_tensor(torch.ones(4), root, [Replicate(), Shard(0)]))
        weight.grad = torch.full_like(weight, 3.0)
        return clip_grad_norm_([weight, on(root["tp"], 4.0)], 1.0).item()

    assert run_ranks(4, program) == [10.0] * 4


def test_infinite_norms_raise_alike() -> None:
    def program(rank: int) -> None:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0], [1])]
        params = [on(mesh, g) for mesh, g in zip(meshes, (1.0, float("inf")), strict=True)]
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)

    run_ranks(2, program)


def test_other_parameters_on_other_ranks_are_refused() -> None:
    def program(rank: int) -> None:
        whole = init_device_mesh("cpu", (2,))
        stage = [DeviceMesh("cpu", [each]) for each in range(2)][rank]
        with pytest.raises(ValueError, match=r"on rank 1 on \[\(0, 1\), \(1,\)\]"):
            clip_grad_norm_([on(whole, 1.0), on(stage, 1.0)], 1.0)

    run_ranks(2, program)


def test_a_rank_that_cannot_know_the_norm_says_so() -> None:
    def program(rank: int) -> None:
        stage = DeviceMesh("cpu", [0])
        alone, plain = on(stage, 1.0), on(None, 1.0)
        if rank == 0:
            assert clip_grad_norm_([alone, plain], 1.0).item() == pytest.approx(8**0.5)
            return
        assert clip_grad_norm_([alone], 1.0).item() == 0
        with pytest.raises(RuntimeError, match="this rank is outside of the mesh"):
            clip_grad_norm_([alone, plain], 1.0)

    run_ranks(2, program)


def test_the_widest_dtype_is_that_of_the_norm() -> None:
    def program(rank: int) -> torch.Tensor:
        narrow = nn.Parameter(on(init_device_mesh("cpu", (2,)), 1.0).detach().bfloat16())
        narrow.grad = torch.ones_like(narrow)
        return clip_grad_norm_([narrow, on(None, 1.01)], 1.0)

    for total in run_ranks(2, program):
        assert_close(total, torch.tensor([1.0] * 4 + [1.01] * 4).norm())


@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_parameters_of_a_mesh_take_a_single_collective(clip: Any) -> None:
    def program(rank: int) -> tuple[float, int]:
        mesh = init_device_mesh("cpu", (2,))
        params = [on(mesh, 3.0), on(mesh, 4.0), on(mesh, 0.0, backward=False)]
        with CommDebugMode() as counts:
            norm = clip(params, 1.0)
        return norm.item(), counts.get_total_counts()

    assert run_ranks(2, program) == [(10.0, 1)] * 2
