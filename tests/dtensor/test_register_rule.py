"""``register_rule``: rules of a user's own operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dtensor.op_checks import noting_gatherings
from tests.dtensor.sharded_values import cut, same
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    register_rule,
    strict,
)
from tilework.dtensor.base import forget_handler
from tilework.testing import run_ranks
from tilework.tiled import op_table


@torch.library.custom_op("own::weighted", mutates_args=())
def weighted(x: Tensor, w: Tensor) -> Tensor:
    """Rows are weighted and summed."""
    return w @ x


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return w[:, None] * grad, x @ grad


weighted.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("own::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    return x.amax(-1)


@torch.library.custom_op("own::ordered", mutates_args=())
def ordered(x: Tensor) -> Tensor:
    return x.sort(-1).values


@ordered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def rules() -> Iterator[None]:
    yield
    for own in (
        torch.ops.own.weighted,
        torch.ops.own.largest,
        torch.ops.own.ordered,
        torch.ops.own.scaled,
        outer,
    ):
        op_table.forget(own)
        forget_handler(own)


@pytest.mark.usefixtures("rules")
def test_a_line_is_all_that_is_needed() -> None:
    register_rule(torch.ops.own.weighted, "r c, r -> c", linear=[[0], [1]])
    x, w = torch.randn(7, 4), torch.randn(7)
    expected = [one.clone().requires_grad_() for one in (x, w)]
    torch.autograd.backward((expected[1] @ expected[0]).sin().sum())

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cases: list[tuple[Any, Any]] = [
            (([Shard(0)], [Shard(0)]), Partial()),
            (([Shard(1)], [Replicate()]), Shard(0)),
            (([Replicate()], [Shard(0)]), Partial()),
            (([Replicate()], [Replicate()]), Replicate()),
        ]
        for placements, lies in cases:
            leaves = [
                distribute_tensor(one, mesh, where).requires_grad_()
                for one, where in zip((x, w), placements, strict=True)
            ]
            with strict():
                found: Any = torch.ops.own.weighted(*leaves)
                assert found.placements == (lies,)
                torch.autograd.backward(found.sin().sum())
            assert torch.allclose(found.full_tensor(), w @ x, atol=1e-5)
            for leaf, one in zip(leaves, expected, strict=True):
                assert isinstance(leaf.grad, DTensor)
                assert one.grad is not None
                assert torch.allclose(leaf.grad.full_tensor(), one.grad, atol=1e-5)

    run_ranks(2, program)


@pytest.mark.usefixtures("rules")
def test_other_reductions_and_dims_that_stay_whole() -> None:
    register_rule(torch.ops.own.largest, "b* i -> b*", reduce_ops={"i": "max"})
    register_rule(torch.ops.own.ordered, "b* i! -> b* i")
    x = torch.randn(6, 5)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        columns = distribute_tensor(x, mesh, [Shard(1)])
        with strict():
            found: Any = torch.ops.own.largest(columns)
            assert found.placements == (Partial("max"),)
            assert torch.equal(found.full_tensor(), x.amax(-1))
            found = torch.ops.own.ordered(columns)
            assert torch.equal(found.full_tensor(), x.sort(-1).values)
            rows: Any = torch.ops.own.ordered(distribute_tensor(x, mesh, [Shard(0)]))
            assert rows.placements == (Shard(0),)

    run_ranks(2, program)


@pytest.mark.usefixtures("rules")
def test_a_new_rule_takes_the_place_of_the_old_at_once() -> None:
    x = torch.randn(4, 4)

    def lies() -> Any:
        def program(rank: int) -> Any:
            mesh = init_device_mesh("cpu", (2,))
            found: Any = torch.ops.own.ordered(distribute_tensor(x, mesh, [Shard(0)]))
            return found.placements

        return run_ranks(2, program)[0]

    assert lies() == (Replicate(),)
    register_rule(torch.ops.own.ordered, "b i! -> b i")
    assert lies() == (Shard(0),)


@each("operator", ["in the library", "in Python"])
@pytest.mark.usefixtures("rules")
def test_tensors_may_be_passed_by_name(operator: str) -> None:
    own: Any = torch.ops.own.weighted if operator == "in the library" else outer
    line = "r c, r -> c" if operator == "in the library" else "r c, r -> r c"
    register_rule(own, line, linear=[[0], [1]])
    register_rule(torch.ops.own.scaled, "a b, a b -> a b")
    x, w = torch.randn(7, 4), torch.randn(7)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows, weights = cut(x, mesh, [Shard(0)]), cut(w, mesh, [Shard(0)])
        with strict():
            same(own(rows, w=weights), own(x, w))
            same(own(w=weights, x=rows), own(x, w))
            same(torch.ops.own.scaled(rows, scale=rows, times=3), x * x * 3)

    run_ranks(2, program)


@each("text", ["", "a b", "a -> b -> c"])
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        register_rule(torch.ops.own.ordered, text)
    assert not op_table.find(torch.ops.own.ordered)[0].has_rule


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


torch.library.define("own::scaled", "(Tensor x, *, Tensor scale, int times=1) -> Tensor")


@torch.library.impl("own::scaled", "default")
def _scaled(x: Tensor, *, scale: Tensor, times: int = 1) -> Tensor:
    return x * scale * times


@torch.library.custom_op("own::noted", mutates_args=())
def _noted(x: Tensor, what: str) -> None:
    _notes.append((tuple(x.shape), what))


@torch.library.custom_op("own::doubled_", mutates_args={"x"})
def _doubled_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("own::clamp", mutates_args=())
def _below_mean(x: Tensor) -> Tensor:
    return x.clamp(max=x.mean())


@torch.library.custom_op("own::noisy", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def _noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def square(x: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x,)):
        result: Tensor = torch.overrides.handle_torch_function(square, (x,), x)
        return result
    return x * x.mean()


def outer(x: Tensor, w: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x, w)):
        result: Tensor = torch.overrides.handle_torch_function(outer, (x, w), x, w=w)
        return result
    return x * w[:, None]


_notes: list[tuple[tuple[int, ...], str]] = []


def test_operators_of_ones_own_take_dtensors() -> None:
    """pytorch#167977, pytorch#167219: tensors by keyword, no results, written in place."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(GRID, mesh, [Shard(0)])
        for scale in (cut(GRID, mesh, [Shard(1)]), cut(GRID, mesh, [Shard(0)]), GRID.clone()):
            same(torch.ops.own.scaled(x, scale=scale, times=3), GRID * GRID * 3)
        assert torch.ops.own.noted(x, "seen") is None
        torch.ops.own.doubled_(x)
        same(x, GRID * 2)

    _notes.clear()
    with noting_gatherings():
        run_ranks(2, program)
    assert _notes == [((4, 6), "seen")] * 2


def test_an_operator_may_have_the_name_of_one_of_torchs() -> None:
    def program(rank: int) -> list[float]:
        torch.manual_seed(rank)
        mesh = init_device_mesh("cpu", (2,))
        x = cut(GRID, mesh, [Shard(0)])
        same(torch.ops.own.clamp(x), GRID.clamp(max=GRID.mean()))
        same(square(x), GRID * GRID.mean())
        drawn: list[float] = torch.ops.own.noisy(cut(GRID, mesh, [Replicate()])).to_local().tolist()
        return drawn

    with noting_gatherings():
        first, second = run_ranks(2, program)
    assert first == second
