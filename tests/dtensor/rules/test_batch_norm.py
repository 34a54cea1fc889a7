"""Batch normalisation over the rows of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dtensor.op_checks import check_op, count_op
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

R = Replicate()
X = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
W, B = torch.tensor([1.0, 2, 0.5, 3]).double(), torch.tensor([0.0, 1, 2, -1]).double()


def normed(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True).sin()


def test_one_reduction_in_each_direction() -> None:
    for placement in (Shard(0), Shard(2)):
        seen = count_op(normed, X, W, B, layouts=[[placement], [R], [R]])
        assert len(seen.forward) == 1, seen.forward
        assert seen.backward == ["all_reduce"]
    seen = count_op(normed, X, W, B, layouts=[[Shard(1)], [Shard(0)], [Shard(0)]])
    assert seen.forward == seen.backward == []


@each("rows", [6, 3, 1])
def test_values_and_gradients(rows: int) -> None:
    check_op(normed, X[:rows], W, B, meshes=[(2,), (3,), (2, 2)], most=14, gathers=False)
    check_op(lambda x: normed(x, None, None), X[:rows], meshes=[(2,)], most=6)
    check_op(lambda x, w: normed(x, w, None), X[:rows], W, meshes=[(2,)], plain=True, most=6)


def test_gradients_of_gradients() -> None:
    def second(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = normed(x * 1, w * 1, b * 1).square().sum()
        return torch.autograd.grad(out, (x, w, b), create_graph=True)

    check_op(second, X, W, B, meshes=[(2,)], most=8)


def test_an_empty_batch_changes_no_statistics() -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        layer = nn.BatchNorm1d(3)
        distribute_module(layer, mesh)
        x = distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]).requires_grad_()
        layer(x).sum().backward()
        assert isinstance(layer.running_mean, DTensor)
        assert isinstance(layer.running_var, DTensor)
        grads = [p.grad.full_tensor().tolist() for p in layer.parameters()]  # type: ignore[union-attr]
        return layer.running_mean.tolist(), layer.running_var.tolist(), grads

    plain = nn.BatchNorm1d(3)
    plain(torch.zeros(0, 3, requires_grad=True)).sum().backward()
    grads = [p.grad.tolist() for p in plain.parameters() if p.grad is not None]
    assert run_ranks(2, program) == [([0, 0, 0], [1, 1, 1], grads)] * 2


@each("norm", [F.batch_norm, F.instance_norm])
@each("graded", [0, 1])
def test_statistics_have_no_gradients(norm: Callable[..., Tensor], graded: int) -> None:
    x, statistics = torch.rand(2, 4, 3), [torch.zeros(4), torch.ones(4)]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        its = [distribute_tensor(each.clone(), mesh, [Replicate()]) for each in statistics]
        its[graded].requires_grad_()
        for placement in (Shard(0), Shard(2)):
            with pytest.raises(RuntimeError, match="is not differentiable with respect to"):
                norm(distribute_tensor(x, mesh, [placement]), *its, None, None, True)
        assert [each.tolist() for each in its] == [each.tolist() for each in statistics]

    run_ranks(2, program)


@pytest.mark.parametrize("count", [1, 5])
def test_statistics_are_those_of_all_rows(count: int) -> None:
    x = X[:count]
    plain = nn.BatchNorm1d(4).double()
    plain(x)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for whole in (False, True):
            layer = nn.BatchNorm1d(4).double()
            if whole:
                distribute_module(layer, mesh)
            layer(distribute_tensor(x, mesh, [Shard(0)]))
            for name, buffer in layer.named_buffers():
                found = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
                assert_close(found, plain.get_buffer(name))

    run_ranks(2, program)
