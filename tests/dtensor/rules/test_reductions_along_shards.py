"""Scans and the greatest elements along sharded dims: totals or candidates move, not the dim."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dtensor.sharded_values import cut, full, same
from tests.layout.random_tilings import examples
from tests.rounding import assert_close
from tilework.dtensor import Partial, Placement, Replicate, Shard
from tilework.dtensor.debug.causes import explain
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks


@examples()
@given(st.data())
def test_topk(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(0, 9)), data.draw(st.integers(2, 4))
    k, largest = data.draw(st.integers(0, rows)), data.draw(st.booleans())
    ways: list[Placement] = [Shard(0), Shard(0, turns=2), Shard(1), Partial(), Replicate()]
    placement = data.draw(st.sampled_from(ways))
    torch.manual_seed(0)
    # No two are equal: torch does not say which of them it takes.
    whole = torch.randperm(3 * rows).double().view(rows, 3).requires_grad_()
    values, index = whole.topk(k, 0, largest)
    values.square().sum().backward()  # type: ignore[no-untyped-call]

    def rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (length,))
        x: Any = cut(whole.detach().requires_grad_(), mesh, [placement])
        found = x.topk(k, 0, largest)
        same(found.values, values)
        assert torch.equal(full(found.indices), index)
        found.values.square().sum().backward()
        assert_close(full(x.grad), whole.grad)

    run_ranks(length, rank)


def test_topk_moves_candidates_only() -> None:
    def rank(rank: int) -> int:
        x = cut(torch.randn(1000), init_device_mesh("cpu", (4,)), [Shard(0)])
        with explain() as log:
            x.topk(2)
        return log.nbytes

    assert run_ranks(4, rank)[0] == 3 * 2 * (4 + 8)  # of the other ranks: values and indices


@examples()
@given(st.data())
def test_gradients_of_gradients_of_logcumsumexp(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 4))
    placement = Shard(0, turns=data.draw(st.integers(1, 2)))
    torch.manual_seed(rows)
    x, g, h = torch.randn(3, rows, 2, dtype=torch.float64)
    x[: data.draw(st.integers(0, 2))] = -torch.inf  # which has no gradient of a gradient in torch

    def grads(*tensors: Any) -> list[Any]:
        x, g, h = (each.requires_grad_() for each in tensors)
        y = x.logcumsumexp(0)
        (d,) = torch.autograd.grad((y * g).sum(), x, create_graph=True)
        return [y, d, *torch.autograd.grad((d * h).sum(), [x, g])]

    wanted = grads(*[each.clone() for each in (x, g, h)])

    def rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (length,))
        for found, want in zip(
            grads(*[cut(each, mesh, [placement]) for each in (x, g, h)]), wanted, strict=True
        ):
            torch.testing.assert_close(full(found), want, equal_nan=True)

    run_ranks(length, rank)
