"""Users' own operators: which function runs, and which functions are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharded.ranks_and_specs import chunks, cut, grid, numbered, on
from tilework.sharded import (
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    registry,
    shard_parameter,
)
from tilework.sharded.specs import ChunkShardingSpec


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_custom", dict(registry._custom))
    monkeypatch.setattr(registry, "_by_spec", dict(registry._by_spec))


def test_a_users_function_runs_with_the_group() -> None:
    groups = []

    @custom_sharded_op_impl(torch.special.zeta)
    def zeta(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        groups.append((process_group, kwargs))
        return torch.special.zeta(args[0].local_tensor(), *args[1:])

    def program(rank: int) -> Any:
        tensor = cut(numbered([4]) + 2, chunks(0, [0, 1]), rank)
        found = torch.special.zeta(tensor, 3.0)
        assert torch.equal(found, torch.special.zeta(tensor.local_tensor(), 3.0))
        return tensor.process_group

    found = on(2, program)
    assert {id(group) for group, _ in groups} == {id(group) for group in found}
    assert [kwargs for _, kwargs in groups] == [{}, {}]


def test_it_goes_before_our_own() -> None:
    @custom_sharded_op_impl(Tensor.size)
    def size(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "mine"

    assert on(1, lambda rank: cut(numbered([4]), chunks(0, [0]), rank).size()) == ["mine"]


def test_a_function_for_one_kind_of_spec() -> None:
    @custom_sharding_spec_op(ChunkShardingSpec, torch.linalg.matrix_exp)
    def matrix_exp(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "chunks"

    def program(rank: int) -> Any:
        whole = numbered([4, 4])
        with pytest.raises(RuntimeError, match=r"'linalg_matrix_exp'.*not supported for Sharded"):
            torch.linalg.matrix_exp(cut(whole, grid([1, 3], [4], [0]), rank))
        return torch.linalg.matrix_exp(cut(whole, chunks(0, [0]), rank))

    assert on(1, program) == ["chunks"]


def test_for_all_kinds_goes_before_one_kind() -> None:
    @custom_sharding_spec_op(ChunkShardingSpec, torch.special.zeta)
    def chunked(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "chunks"

    @custom_sharded_op_impl(torch.special.zeta)
    def every(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "all"

    def program(rank: int) -> Any:
        return torch.special.zeta(cut(numbered([4]), chunks(0, [0]), rank), 3.0)

    assert on(1, program) == ["all"]


def test_functions_that_take_something_else_are_refused() -> None:
    def too_many(types: Any, args: Any, kwargs: Any, process_group: Any, more: Any) -> None: ...
    def too_few(types: Any) -> None: ...
    def named(types: Any, args: Any, kwargs: Any, *, process_group: Any) -> None: ...
    def optional(types: Any, args: Any, kwargs: Any, group: Any, more: Any = 1) -> None: ...

    functions: tuple[Any, ...] = (too_many, too_few, named, optional)
    for function in functions:
        for register in (
            custom_sharded_op_impl(torch.special.zeta),
            custom_sharding_spec_op(ChunkShardingSpec, torch.special.zeta),
        ):
            with pytest.raises(TypeError, match="expects signature"):
                register(function)
    assert torch.special.zeta not in registry._custom


def test_functions_that_take_anything_are_taken() -> None:
    @custom_sharded_op_impl(torch.special.zeta)
    def anything(*everything: Any) -> int:
        return len(everything)

    def program(rank: int) -> Any:
        return torch.special.zeta(cut(numbered([4]), chunks(0, [0]), rank), 3.0)

    assert on(1, program) == [4]


def test_a_layer_with_a_sharded_weight_calls_the_users_linear() -> None:
    result = torch.rand(15, 16)

    @custom_sharding_spec_op(ChunkShardingSpec, torch.nn.functional.linear)
    def linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        return result

    def program(rank: int) -> None:
        layer = torch.nn.Linear(32, 16)
        shard_parameter(layer, "weight", chunks(0, [0, 1]))
        assert layer(torch.rand(15, 32)) is result

    on(2, program)
