"""The ways in which functional collectives name their group, and torch's names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tables import each
from tilework.distributed import functional
from tilework.distributed.nn import functional as nn_functional
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

#: With torch's names of parameters, which type checkers do not know.
like_torch: Any = functional

WAYS: list[Callable[[DeviceMesh], Any]] = [
    lambda mesh: mesh["tp"],
    lambda mesh: (mesh, 1),
    lambda mesh: (mesh, "tp"),
    lambda mesh: list(mesh["tp"].spec.ranks),
]


@each("way", WAYS)
def test_a_group_is_named_by_a_mesh_or_by_ranks(way: Callable[[DeviceMesh], Any]) -> None:
    def program(rank: int) -> float:
        group = way(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        x = torch.tensor([float(rank)])
        result: torch.Tensor = like_torch.all_reduce(x, reduceOp="sum", group=group, tag="")
        return result.item()

    assert run_ranks(4, program) == [1.0, 1.0, 5.0, 5.0]


@each("way", WAYS)
def test_a_group_is_named_likewise_in_compiled_functions(way: Callable[[DeviceMesh], Any]) -> None:
    def program(rank: int) -> None:
        group = way(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
        compiled = torch.compile(
            lambda x: like_torch.all_reduce(x, "sum", group) + 1, backend="eager", fullgraph=True
        )
        assert compiled(torch.ones(1)).item() == 2.0

    run_ranks(1, program)


def test_what_names_no_group_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(RuntimeError, match="needs mesh_dim"):
            functional.all_reduce(torch.ones(1), "sum", mesh)
        with pytest.raises(TypeError, match="a list as group must have global ranks"):
            like_torch.all_reduce(torch.ones(1), "sum", ["a"])
        with pytest.raises(TypeError, match="both 'op' and torch's name"):
            like_torch.all_reduce(torch.ones(1), "sum", reduceOp="sum")
        with pytest.raises(NotImplementedError, match="'tag' can only be ''"):
            like_torch.all_reduce(torch.ones(1), "sum", tag="mine")
        with pytest.raises(TypeError, match=r"tilework\.distributed\.nn\.functional"):
            like_torch.all_to_all_single(torch.ones(1), torch.ones(1))

    run_ranks(1, program)


def test_collectives_with_buffers_differentiate_the_sum_of_the_losses() -> None:
    def program(rank: int) -> list[list[float]]:
        x = [torch.full((2,), rank + 1.0, requires_grad=True) for _ in range(5)]
        outs = [
            nn_functional.all_gather(x[0])[1],
            nn_functional.gather(x[1], dst=1)[0],
            nn_functional.scatter([x[2], x[2] * 2], src=1),
            nn_functional.reduce_scatter(torch.zeros(2), [x[3], x[3] * 2]),
            nn_functional.all_to_all_single(torch.zeros(2), x[4]),
        ]
        sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]
        grads = [each.grad for each in x]
        return [grad.tolist() for grad in grads if grad is not None]

    first, second = run_ranks(2, program)
    assert first == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [3.0, 3.0], [1.0, 1.0]]
    assert second == [[2.0, 2.0], [0.0, 0.0], [3.0, 3.0], [3.0, 3.0], [1.0, 1.0]]


def test_buffers_are_filled() -> None:
    def program(rank: int) -> list[list[float]]:
        outs = [torch.zeros(rank + 1) for _ in range(2)]
        sent = [torch.full((n + 1,), float(rank)) for n in range(2)]
        results = nn_functional.all_to_all(outs, sent)
        assert all(torch.equal(*pair) for pair in zip(outs, results, strict=True))
        return [out.tolist() for out in outs]

    assert run_ranks(2, program) == [[[0.0], [1.0]], [[0.0, 0.0], [1.0, 1.0]]]
