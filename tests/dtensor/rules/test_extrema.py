"""Extrema of values that are partial in the same extremum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.dtensor.op_checks import check_op, count_op
from tests.fuzz.programs import compare
from tests.tables import pairs
from tilework.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.dtensor.rules import extrema
from tilework.testing import run_ranks

A = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
B = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "max": torch.maximum,
    "min": torch.minimum,
}


@pytest.mark.parametrize("op", TWO)
def test_extrema_of_partial_extrema_communicate_nothing(op: str) -> None:
    other = "min" if op == "max" else "max"
    both = {"two": TWO[op], "max of two": getattr(torch, op)}
    for fn in both.values():
        seen = count_op(fn, A, B, layouts=[[Partial(op)], [Partial(op)]])
        assert seen.forward == []
        assert seen.placements == [(Partial(op),)]
        for layout in ([Partial(other)], [Replicate()]):
            assert "all_reduce" in count_op(fn, A, B, layouts=[[Partial(op)], layout]).forward
    for fn in (getattr(torch, op), lambda x: getattr(torch, f"a{op}")(x, 0)):
        seen = count_op(fn, A, layouts=[[Partial(op)]])
        assert seen.forward == []


@pytest.mark.parametrize("op", TWO)
def test_their_values_and_gradients(op: str) -> None:
    check_op(TWO[op], A, B, meshes=[(2,), (2, 2)], partial=("max", "min", "sum"), most=30)
    check_op(TWO[op], A, B[0], meshes=[(3,)], partial=(op,), most=12, plain=True)
    check_op(getattr(torch, f"a{op}"), A, meshes=[(2, 2)], partial=(op,))
    check_op(lambda x: getattr(x, op)(1), A, meshes=[(2,)], partial=(op,))


@pairs(
    call=["torch.maximum(v0, v1)", "torch.maximum(v1, v0)", "v0.max(v1)"],
    lies=["PM", "R", "S0", "P"],
    mesh=[(2,), (3,)],
)
def test_equal_values_share_the_gradient(call: str, lies: str, mesh: tuple[int, ...]) -> None:
    compare(
        f"v0 = leaf('v0', (4, 2), 5, 'PM')\nv1 = leaf('v1', (4, 2), 5, '{lies}')\nv2 = {call}", mesh
    )


class _OnAnotherDevice:
    """torch, whose default device is not that of the DTensors, as the CPU beside a GPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        makes = name in ("arange", "full", "ones", "tensor", "zeros")
        return partial(found, device="meta") if makes else found


def test_indices_are_made_on_the_device_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks with and without elements, whose collectives are else of two devices."""
    monkeypatch.setattr(extrema, "torch", _OnAnotherDevice())

    def program(rank: int) -> None:
        rows = A[:2]  # the third rank has none
        x = distribute_tensor(rows, init_device_mesh("cpu", (3,)), [Shard(0)]).requires_grad_()
        assert int(x.argmax()) == int(rows.argmax())
        assert x.argmin(0).tolist() == rows.argmin(0).tolist()
        values, places = x.max(0)
        assert values.tolist() == rows.max(0)[0].tolist()
        assert places.tolist() == rows.max(0)[1].tolist()
        (grad,) = torch.autograd.grad(values.sum(), x)
        assert not grad.is_meta

    run_ranks(3, program)
