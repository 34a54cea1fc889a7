"""Calls that torch refuses for their sizes, dims or dtypes: no rank communicates to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tilework.dtensor import (
    Partial,
    Placement,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
    register_rule,
)
from tilework.dtensor.handlers import forget_handler
from tilework.testing import run_ranks
from tilework.tiled import op_table

X = torch.arange(12.0).view(4, 3)
CALLS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(7),
    "view of two unknown sizes": lambda x: x.view(-1, -1),
    "reshape": lambda x: x.reshape(-1, 5),
    "unflatten": lambda x: x.unflatten(0, (3, 3)),
    "permute": lambda x: x.permute(0, 0),
    "transpose": lambda x: x.transpose(0, 5),
    "expand": lambda x: x.expand(5, 3),
    "sum": lambda x: x.sum(4),
    "cumsum": lambda x: x.cumsum(4),
    "split": lambda x: x.split([1, 1]),
    "add": lambda x: x + torch.ones(5),
    "add_": lambda x: x.add_(torch.ones(7)),
    "copy_": lambda x: x.copy_(torch.ones(7)),
    "matmul": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, torch.ones(2, 2)]),
    "where": lambda x: torch.where(torch.ones(5, dtype=torch.bool), x, x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placement", [Shard(0), Partial()])
def test_nothing_is_gathered_to_refuse_a_call(name: str, placement: Placement) -> None:
    call = CALLS[name]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(X.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [placement])
        with explain() as log, pytest.raises(type(expected.value)):
            call(x)
        assert not log.events
        assert torch.equal(x.full_tensor(), X)

    run_ranks(2, program)


def test_the_words_are_torchs() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            x.add_(torch.ones(5))
        with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 12"):
            x.view(7)

    run_ranks(2, program)


_seen: list[tuple[int, ...]] = []


@torch.library.custom_op("own_refused::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    _seen.append(tuple(x.shape))
    return x.double().sum(dim=0)


@pytest.fixture
def its_rule() -> Iterator[None]:
    yield
    op_table.forget(torch.ops.own_refused.summed)
    forget_handler(torch.ops.own_refused.summed)


@pytest.mark.usefixtures("its_rule")
@pytest.mark.parametrize("has_rule", [False, True])
def test_operators_of_ones_own_are_called_with_nothing_made_up(has_rule: bool) -> None:
    """They may do more than return a result."""
    if has_rule:
        register_rule(torch.ops.own_refused.summed, "r c -> c", linear=[[0]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(X[:1].bfloat16(), mesh, [Shard(0)])  # rank 1 has no elements
        result = torch.ops.own_refused.summed(x)
        assert torch.equal(result.full_tensor(), X[0].double())

    _seen.clear()
    run_ranks(2, program)
    assert sorted(_seen) == ([(0, 3), (1, 3)] if has_rule else [(1, 3), (1, 3)])


def test_what_torch_refuses_only_without_memory_is_computed() -> None:
    """Products of groups look at strides, and have no meta kernel for float32."""
    x, weights = torch.randn(8, 16), torch.randn(2, 16, 8)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    try:
        expected = torch._grouped_mm(x, weights, offs=ends)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch has no such product: {error}")

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(x, mesh, [Shard(1)])
        experts = distribute_tensor(weights, mesh, [Shard(0)])
        result: Any = torch._grouped_mm(sharded, experts, offs=ends)
        assert torch.equal(result.full_tensor(), expected)

    run_ranks(2, program)
