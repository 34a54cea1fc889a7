"""Errors of calls that look right: each says what is wrong, and what to do instead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests.dtensor.sharded_values import cut
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    GatherWarning,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    plan_redistribution,
    zeros,
)
from tilework.errors import PeerLostError
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

X = torch.arange(12.0).view(4, 3)
Call = Callable[[DTensor, DeviceMesh], object]


def assert_says(
    call: Call, *words: str, error: type[Exception] = TypeError, ranks: int = 2
) -> None:
    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (ranks,))
        with pytest.raises(error) as raised:
            call(cut(X, mesh, [Shard(0)]), mesh)
        return str(raised.value)

    for text in run_ranks(ranks, program):
        for word in words:
            assert word in text, text


@each(
    "call",
    [
        lambda x, mesh: distribute_tensor(X, mesh, Shard(0)),  # type: ignore[arg-type]
        lambda x, mesh: DTensor.from_local(X, mesh, Shard(0)),  # type: ignore[arg-type]
        lambda x, mesh: x.redistribute(mesh, Shard(0)),
        lambda x, mesh: x.redistribute(placements=Shard(0)),
        lambda x, mesh: zeros(4, device_mesh=mesh, placements=Shard(0)),  # type: ignore[arg-type]
        lambda x, mesh: plan_redistribution(x, Shard(0)),  # type: ignore[arg-type]
        lambda x, mesh: x.to_local(grad_placements=Shard(0)),
        lambda x, mesh: DTensor.from_local(X, mesh, grad_placements=Shard(0)),  # type: ignore[arg-type]
    ],
)
def test_a_placement_without_a_list(call: Call) -> None:
    assert_says(call, "pass [Shard(dim=0)], not Shard(dim=0)")


def test_placements_where_the_mesh_belongs() -> None:
    assert_says(lambda x, mesh: distribute_tensor(X, [Shard(0)]), "come after the mesh")  # type: ignore[arg-type]
    assert_says(
        lambda x, mesh: x.redistribute([Replicate()]),  # type: ignore[arg-type]
        "redistribute(placements=[Replicate()])",
    )


def test_placements_that_are_none() -> None:
    assert_says(lambda x, mesh: distribute_tensor(X, mesh, 0), "as [Shard(0)]; got 0")  # type: ignore[arg-type]
    assert_says(lambda x, mesh: distribute_tensor(X, mesh, "S"), "got 'S'")  # type: ignore[arg-type]


@each("order", [0, "0", [0.0], [None]])
def test_an_order_that_is_none(order: Any) -> None:
    calls: list[Call] = [
        lambda x, mesh: distribute_tensor(X, mesh, [Shard(0)], order=order),
        lambda x, mesh: DTensor.from_local(X, mesh, [Shard(0)], order=order),
        lambda x, mesh: x.redistribute(placements=[Shard(1)], order=order),
        lambda x, mesh: plan_redistribution(x, [Shard(1)], order),
    ]
    for call in calls:
        assert_says(call, "order has the number of each axis")


def test_a_shape_that_is_none() -> None:
    for shape in (4, "4", (8.0, 3)):
        assert_says(
            lambda x, mesh, shape=shape: DTensor.from_local(X, mesh, [Shard(0)], shape=shape),  # type: ignore[misc]
            "shape has a size for each dim",
        )
    assert_says(
        lambda x, mesh: DTensor.from_local(X, mesh, [Shard(0)], shape=(-4, 3)),
        "sizes of 0 or more, got (-4, 3)",
        error=ValueError,
    )


def test_an_axis_of_a_mesh_by_number() -> None:
    assert_says(lambda x, mesh: mesh[0], "names of axes", "mesh_dim_names", "got 0")  # type: ignore[index]


def test_a_forgotten_mesh() -> None:
    assert_says(
        lambda x, mesh: distribute_tensor(X), "with mesh:", "init_device_mesh", error=RuntimeError
    )


@each(
    "call",
    [
        lambda x, mesh: torch.vmap(lambda row: row * 2)(x),
        lambda x, mesh: torch.func.grad(lambda v: v.sum())(x),
        lambda x, mesh: torch.func.vjp(lambda v: v * 2, x),
    ],
)
def test_function_transforms(call: Call) -> None:
    assert_says(call, "torch.func's transforms", "backward()", error=RuntimeError)


def test_a_dtensor_in_the_surroundings_of_a_transformed_function() -> None:
    for transform in (torch.vmap, torch.func.functionalize):

        def call(x: Any, mesh: Any, transform: Any = transform) -> Any:
            return transform(lambda row: row + x)(torch.ones(2, *x.shape))

        assert_says(call, "torch.func's transforms", "surroundings", error=RuntimeError)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode() -> None:
    # On one rank: threads share torch's level of forward mode.
    assert_says(
        lambda x, mesh: torch.func.jvp(lambda v: v * 2, (x,), (x,)),
        *("forward-mode", "backward()"),
        ranks=1,
    )


def test_export() -> None:
    def export(x: DTensor, mesh: DeviceMesh) -> object:
        return torch.export.export(distribute_module(nn.Linear(3, 2), mesh), (torch.ones(2, 3),))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(TypeError, match=r"torch\.export.*plain copy of the model"):
            export(cut(X, mesh, [Shard(0)]), mesh)

    run_ranks(1, program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@each(
    "call",
    [
        lambda x, mesh: x.cuda(),
        lambda x, mesh: torch.zeros_like(x, device="cuda"),
        lambda x, mesh: torch.randn_like(x, device=torch.device("cuda")),
        lambda x, mesh: x.new_full((2,), 1.0, device="cuda:0"),
        lambda x, mesh: x.new_tensor([1.0], device="cuda"),
        lambda x, mesh: x.to("cuda"),
        lambda x, mesh: x.to(device="cuda:0"),
        lambda x, mesh: distribute_module(nn.Linear(3, 2), mesh).cuda(),
        lambda x, mesh: init_device_mesh("cuda", (2,)),
    ],
)
def test_devices_that_are_not_there(call: Call) -> None:
    assert_says(call, "cuda", "is_available() is False", error=RuntimeError)


def test_devices_that_do_not_exist() -> None:
    assert_says(
        lambda x, mesh: init_device_mesh("gpu", (2,)),
        "'cpu' or 'cuda'; got 'gpu'",
        error=RuntimeError,
    )


def test_a_gather_is_told_once_by_a_job() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X, mesh, [Shard(0)])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                x.unique()
        return [str(each.message) for each in told if each.category is GatherWarning]

    first, second = run_ranks(2, program, kind="processes")
    assert len(first) == 1, first
    assert second == []


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("handled", [False, True])
def test_an_operator_that_raises_on_one_rank_alone(
    kind: Literal["threads", "processes"], handled: bool
) -> None:
    """Its rows have a target out of range; the other rank waits in the operator."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        logits = cut(X, mesh, [Shard(0)])
        target = cut(torch.tensor([0, 1, 2, 9]), mesh, [Shard(0)])
        with pytest.raises(IndexError) if handled and rank else nullcontext():
            nn.functional.cross_entropy(logits, target)

    lost, culprit = run_ranks(2, program, kind=kind, return_exceptions=True)
    assert isinstance(lost, PeerLostError)
    assert "cross_entropy_loss of a DTensor" in str(lost)
    assert "may have raised on another rank alone" in str(lost) or "rank 1 raised Index" in str(
        lost
    )
    assert culprit is None if handled else isinstance(culprit, IndexError)


def after_fork(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = cut(X, mesh, [Shard(0)])
    x.sum().item()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = str(x.sum().item())
        except Exception as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert x.sum().item() == X.sum().item()
    return said


def test_use_after_a_fork() -> None:
    for said in run_ranks(2, after_fork, kind="processes"):
        assert "forked from the rank" in said, said
        assert "spawn" in said


def test_nothing_else_is_refused(request: Any) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X, mesh, (Shard(0),))
        assert x.to("cpu").shape == X.shape
        assert x.to(torch.float64).dtype == torch.float64
        assert x.redistribute(placements=iter([Replicate()])).to_local().shape == X.shape

    run_ranks(2, program)
