"""Functions of plain tensors on the parts of DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed.functional as functional
from tests.dtensor.sharded_values import cut, same
from tilework.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    local_map,
)
from tilework.testing import run_ranks


def product(x: Tensor, w: Tensor) -> Tensor:
    assert type(x) is type(w) is Tensor
    return x @ w


def test_parts_go_in_and_come_out() -> None:
    """Uneven ones too: nothing is assumed of the others."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        x, w = torch.randn(7, 4), torch.randn(4, 5)
        rows = local_map(product, [Shard(0)], ([Shard(0)], [Replicate()]))
        terms = local_map(product, [Partial()], ([Shard(1)], [Shard(0)]))
        x = distribute_tensor(x, mesh).to_local()
        w = distribute_tensor(w, mesh).to_local()
        found = rows(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh))
        assert found.shape == (7, 5)
        assert torch.allclose(found.full_tensor(), x @ w, atol=1e-6)
        found = terms(
            distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Shard(0)])
        )
        assert found.placements == (Partial(),)
        assert torch.allclose(found.full_tensor(), x @ w, atol=1e-6)

    run_ranks(3, program)


def test_gradients_are_those_of_the_plain_function() -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    expected = [one.clone().requires_grad_() for one in (x, w)]
    (expected[0] @ expected[1]).sin().sum().backward()  # type: ignore[no-untyped-call]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cases: list[tuple[Any, Any]] = [
            ([Shard(0)], ([Shard(0)], [Replicate()])),
            ([Shard(1)], ([Replicate()], [Shard(1)])),
            ([Replicate()], ([Replicate()], [Replicate()])),
            ([Partial()], ([Shard(1)], [Shard(0)])),
        ]
        for out, lies in cases:
            leaves = [
                distribute_tensor(one, mesh, placements).requires_grad_()
                for one, placements in zip((x, w), lies, strict=True)
            ]
            found = local_map(product, out)(*leaves)
            found.sin().sum().backward()
            for leaf, one in zip(leaves, expected, strict=True):
                assert isinstance(leaf.grad, DTensor)
                assert one.grad is not None
                assert torch.allclose(leaf.grad.full_tensor(), one.grad, atol=1e-5), out

    run_ranks(2, program)


def test_a_gradient_that_placements_do_not_tell_must_be_told() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        scale = distribute_tensor(torch.tensor(3.0, requires_grad=True), mesh)

        def total(x: Tensor, scale: Tensor) -> Tensor:
            return functional.all_reduce((x * scale).sum(), "sum", mesh.get_group())

        with pytest.raises(ValueError, match="Pass in_grad_placements"):
            local_map(total, [Replicate()])(x, scale)
        with torch.no_grad():
            assert local_map(total, [Replicate()])(x, scale).item() == 18

    run_ranks(2, program)


def test_several_results_and_other_things() -> None:
    @local_map(out_placements=([Shard(0)], None, [Replicate()]))
    def both(pair: list[Tensor], number: int, *, more: int) -> tuple[Tensor, int, Tensor]:
        return pair[0] + pair[1], number + more, torch.ones(2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        total, number, ones = both([x, x], 3, more=4)
        assert total.full_tensor().tolist() == [0, 2, 4, 6]
        assert number == 7
        assert isinstance(ones, DTensor)
        plain = both([torch.ones(2), torch.ones(2)], 1, more=1)
        assert type(plain[0]) is Tensor

    run_ranks(2, program)


def test_inputs_are_checked_or_redistributed() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        same: Any = lambda x, *_: x  # noqa: E731

        with pytest.raises(ValueError, match="redistribute_inputs=True"):
            local_map(same, [Shard(1)], ([Shard(1)],))(x)
        found = local_map(same, [Shard(1)], ([Shard(1)],), redistribute_inputs=True)(x)
        assert found.placements == (Shard(1),)
        assert found.shape == (4, 4)
        with pytest.raises(ValueError, match="an entry for each of the 1 arguments, got 2"):
            local_map(same, [Shard(0)], ([Shard(0)], None))(x)
        with pytest.raises(TypeError, match="argument 0 is a DTensor"):
            local_map(same, [Shard(0)], (None,))(x)
        with pytest.raises(TypeError, match="argument 1 is a int"):
            local_map(same, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, 1)
        with pytest.raises(TypeError, match="a sequence of placements"):
            local_map(same, [Shard(0)], (Shard(0),))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="by position"):
            local_map(same, [Shard(0)])(x=x)
        other = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 1)))
        with pytest.raises(ValueError, match="must be on one mesh"):
            local_map(same, [Shard(0)])(x, other)

    run_ranks(2, program)


def test_results_are_checked() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

        def pair(x: Tensor) -> Any:
            return x, x

        with pytest.raises(ValueError, match="are for 1 results, but pair returned 2"):
            local_map(pair, [Shard(0)])(x)
        with pytest.raises(TypeError, match="must return plain tensors"):
            local_map(lambda _: x, [Shard(0)])(x)
        with pytest.raises(TypeError, match="returned a int"):
            local_map(lambda _: 1, [Shard(0)])(x)
        with pytest.raises(TypeError, match="returned a Tensor"):
            local_map(lambda x: x, None)(x)

    run_ranks(2, program)


def test_gradients_of_mapped_functions_are_those_of_plain_ones() -> None:
    """autoparallel#515."""
    x, w = torch.randn(4, 6), torch.randn(6, 4)
    plain = [one.clone().requires_grad_() for one in (x, w)]
    (plain[0] @ plain[1]).sin().sum().backward()  # type: ignore[no-untyped-call]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for left, right, out in (
            (Shard(0), Replicate(), Shard(0)),
            (Replicate(), Shard(1), Shard(1)),
            (Shard(1), Shard(0), Partial()),
            (Replicate(), Replicate(), Replicate()),
        ):
            a, b = (cut(one, mesh, [how]) for one, how in ((x, left), (w, right)))
            a.requires_grad_(), b.requires_grad_()
            product = local_map(torch.mm, [out], ([left], [right]))
            product(a, b).sin().sum().backward()
            same(a.grad, plain[0].grad)
            same(b.grad, plain[1].grad)

    run_ranks(2, program)
