"""Gradients of tensors that are expanded and then sharded."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor.op_checks import check_op, count_op
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

CLS = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(1))
X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2))


def prefixed(cls: Any, x: Any) -> Any:
    return torch.cat([cls.expand(x.shape[0], -1, -1), x], 1).sin()


def test_the_rows_are_summed_where_they_are() -> None:
    seen = count_op(prefixed, CLS, X, layouts=[[Replicate()], [Shard(0)]])
    assert seen.forward == []
    assert seen.backward.count("all_reduce") == 1
    assert not any("gather" in name for name in seen.backward)


@each("rows", [6, 1, 0])
def test_gradients_are_those_of_plain_tensors(rows: int) -> None:
    check_op(prefixed, CLS, X[:rows], meshes=[(2,), (2, 2)], partial=())
    check_op(
        lambda row, x: torch.cat([row.expand(rows, 4), x[:, 0]]).cos() + row,
        CLS[0, 0],
        X[:rows],
        meshes=[(2,)],
        partial=(),
    )


@each("look", ["hook", "retain_grad", "autograd.grad", "inputs", "twice"])
def test_a_gradient_that_somebody_looks_at_has_all_its_rows(look: str) -> None:
    def gradient(cls: Any, x: Any) -> Any:
        rows = cls.expand(x.shape[0], -1, -1)
        seen: list[Any] = []
        if look == "hook":
            rows.register_hook(seen.append)
        if look == "retain_grad":
            rows.retain_grad()
        loss: Any = (torch.cat([rows, x], 1).sin() ** 2).sum()
        if look == "autograd.grad":
            return torch.autograd.grad(loss, rows)[0]
        if look == "twice":
            (first,) = torch.autograd.grad(loss, cls, create_graph=True)
            first.square().sum().backward()
            return cls.grad
        loss.backward(inputs=[rows] if look == "inputs" else None)
        return seen[0] if look == "hook" else rows.grad

    expected = gradient(CLS.clone().requires_grad_(), X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cls = distribute_tensor(CLS, mesh, [Replicate()]).requires_grad_()
        found = gradient(cls, distribute_tensor(X, mesh, [Shard(0)]))
        assert_close(found.full_tensor(), expected)

    run_ranks(2, program)
