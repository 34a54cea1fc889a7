"""Rules as lists of placements: what becomes sharded, what partial, what is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tables import each
from tilework.dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    register_sharding,
)
from tilework.testing import run_ranks


@torch.library.custom_op("lists_of_placements::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, scale: int) -> torch.Tensor:
    return scale * (a @ b)


@product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, scale: int) -> torch.Tensor:
    return a @ b


@product.register_kernel("cpu")
def _(a: torch.Tensor, b: torch.Tensor, scale: int) -> torch.Tensor:
    return scale * (a @ b)


@register_sharding(torch.ops.lists_of_placements.product.default)
def _(a: Any, b: Any, scale: int) -> list[Any]:
    assert (a.ndim, b.ndim) == (2, 2)
    return [
        ([Replicate()], [Replicate(), Replicate(), None]),
        ([Shard(0)], [Shard(0), Replicate(), None]),
        ([Shard(1)], [Replicate(), Shard(-1), None]),
        ([Partial()], [Shard(1), Shard(0), None]),
        ([Partial()], [Partial(), Replicate(), None]),
        ([Shard(0)], [Shard(0), Shard(0), None]),  # shards again what is sharded above
    ]


CASES = [
    (Shard(0), Replicate(), Shard(0)),
    (Replicate(), Shard(1), Shard(1)),
    (Shard(1), Shard(0), Partial()),
    (Partial(), Replicate(), Partial()),
]


@each(("left", "right", "expected"), CASES)
def test_a_call_runs_as_the_list_says(left: Any, right: Any, expected: object) -> None:
    def program(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2,))
        a, b = torch.arange(12.0).reshape(3, 4), torch.arange(8.0).reshape(4, 2)
        x = distribute_tensor(a, mesh, [Replicate()]).redistribute(placements=[left])
        y = distribute_tensor(b, mesh, [right])
        with CommDebugMode() as comm:
            out = torch.ops.lists_of_placements.product(x, y, 2)
        assert comm.get_total_counts() == 0
        torch.testing.assert_close(out.full_tensor(), 2 * a @ b)
        return out.placements[0]

    assert run_ranks(2, program)[0] == expected


def test_what_no_line_of_the_list_shards_is_gathered() -> None:
    @torch.library.custom_op("lists_of_placements::whole", mutates_args=())
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    @whole.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @register_sharding(torch.ops.lists_of_placements.whole)
    def _(x: Any) -> list[Any]:
        return [([Shard(1)], [Shard(1)])]

    def program(rank: int) -> list[list[float]]:
        x = distribute_tensor(torch.ones(4, 1), init_device_mesh("cpu", (2,)), [Shard(0)])
        full: torch.Tensor = torch.ops.lists_of_placements.whole.default(x).full_tensor()
        return full.tolist()

    assert run_ranks(2, program)[0] == [[1.0], [2.0], [3.0], [4.0]]


def test_maxima_that_pass_through_are_no_sums() -> None:
    @torch.library.custom_op("lists_of_placements::positive", mutates_args=())
    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)

    positive.register_fake(torch.empty_like)

    @register_sharding(torch.ops.lists_of_placements.positive)
    def _(x: Any) -> list[Any]:
        return [([Partial("max")], [Partial("max")])]

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.tensor([-2.0, 1.0][rank]), mesh, [Partial()])
        return float(torch.ops.lists_of_placements.positive(x))

    assert run_ranks(2, program) == [0.0, 0.0]


def test_an_operator_whose_shapes_nobody_knows_is_refused_by_name() -> None:
    @torch.library.custom_op("lists_of_placements::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @register_sharding(torch.ops.lists_of_placements.unknown.default)
    def _(x: Any) -> list[Any]:
        return [([Shard(0)], [Shard(0)])]

    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(NotImplementedError, match="register_fake"):
            torch.ops.lists_of_placements.unknown(x)

    run_ranks(1, program)
