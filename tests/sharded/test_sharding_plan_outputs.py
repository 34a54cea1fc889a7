"""What happens to a module's output: cut anew, or reduced to this rank's shard."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import chunks, cut, grid, join, numbered, on, parts_of
from tests.tables import each
from tilework.sharded import (
    ShardedTensor,
    ShardingSpec,
    collect_local_shard,
    init_from_local_shards,
    rand,
    reshard_output,
)

ROWS, COLUMNS = chunks(0, range(4)), chunks(1, range(4))


class Holder(nn.Module):
    """Returns a sharded tensor of its own."""

    def __init__(self, spec: ShardingSpec, *size: int, **options: Any) -> None:
        super().__init__()
        self.st = rand(spec, *size, **options)

    def forward(self) -> ShardedTensor:
        return self.st


class Same(nn.Module):
    """Returns what it is given."""

    def forward(self, given: Any) -> Any:
        return given


def test_output_is_resharded_as_by_reshard() -> None:
    def program(rank: int) -> None:
        module = Holder(ROWS, 24, 12)
        same = init_from_local_shards(copy.deepcopy(module().local_shards()), 24, 12)
        same.reshard(COLUMNS)
        assert reshard_output(module, COLUMNS) is module
        made = module()
        assert made.sharding_spec() == COLUMNS
        assert made.local_tensor().shape == (24, 3)
        assert torch.equal(made.local_tensor(), same.local_tensor())

    on(4, program)


def test_the_module_keeps_what_it_holds() -> None:
    def program(rank: int) -> None:
        module = reshard_output(Holder(ROWS, 8, 8), COLUMNS)
        first, second = module(), module()
        assert module.st.sharding_spec() == ROWS
        assert torch.equal(first.full_tensor(), module.st.full_tensor())
        assert torch.equal(first.local_tensor(), second.local_tensor())

    on(4, program)


def test_other_outputs_are_left_alone() -> None:
    def program(rank: int) -> None:
        plain, table = torch.ones(2), cut(numbered((4, 4)), chunks(0, [0, 1]), rank)
        module = reshard_output(Same(), chunks(1, [1, 0]))
        made = module({"a": [plain, None, "x"], "b": (table,)})
        assert made["a"] == [plain, None, "x"]
        assert made["b"][0].sharding_spec() == chunks(1, [1, 0])
        assert module(plain) is plain
        local = collect_local_shard(Same())([table, 3])
        assert torch.equal(local[0], table.local_tensor())
        assert local[1] == 3

    on(2, program)


SPECS = [
    COLUMNS,
    chunks(0, [2, 0, 1, 2]),  # rank 3 has no shard afterwards
    grid([3, 1], [2, 4], [3, 3, 1, 0]),
    chunks(1, [3]),
]


@each("target", SPECS)
@each("source", SPECS)
def test_gradients_come_back(source: ShardingSpec, target: ShardingSpec) -> None:
    """Also from and to ranks without shards, which take part all the same."""
    weights = numbered((4, 6))

    def program(rank: int) -> tuple[Any, Any]:
        table = cut(numbered((4, 6)), source, rank, requires_grad=True)
        made = reshard_output(Same(), target)(table)
        assert made.requires_grad
        assert torch.equal(made.full_tensor().detach(), numbered((4, 6)))
        (made * cut(weights, target, rank)).square().sum().backward()
        gradient = [(s.metadata, s.tensor.grad) for s in table.local_shards()]
        return parts_of(made), gradient

    results = on(4, program)
    values = join([part for parts, _ in results for part in parts], (4, 6))
    gradient = join([part for _, parts in results for part in parts], (4, 6))
    assert torch.equal(values, numbered((4, 6)))
    assert torch.equal(gradient, 2 * numbered((4, 6)) * weights**2)


def test_no_graph_where_none_is_wanted() -> None:
    def program(rank: int) -> None:
        module = reshard_output(Holder(ROWS, 8, 8, requires_grad=True), COLUMNS)
        with torch.no_grad():
            assert module().local_tensor().is_leaf
        assert not module().local_tensor().is_leaf

    on(4, program)


def test_a_group_of_some_ranks() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([1, 2])
        table = cut(numbered((4, 4)), chunks(0, [2, 1]), rank, process_group=group)
        return parts_of(reshard_output(Same(), chunks(1, [1]))(table))

    results = on(3, program)
    assert [len(parts) for parts in results] == [0, 1, 0]
    assert torch.equal(results[1][0][1], numbered((4, 4)))


@each("size", [(23, 15), (4, 16), (3, 2)])
def test_local_shard(size: tuple[int, int]) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        module = Holder(ROWS, *size)
        before = module().local_tensor()
        assert collect_local_shard(module) is module
        return before, module()

    for shard, output in on(4, program):
        assert type(output) is Tensor
        # A dim of which one is left is left out.
        expected = shard.squeeze(0) if shard.size(0) == 1 else shard
        assert output.shape == expected.shape
        assert torch.equal(output, expected)


def test_local_shard_has_gradients() -> None:
    def program(rank: int) -> list[float]:
        module = collect_local_shard(Holder(chunks(-1, [0, 1]), 2, 2, requires_grad=True))
        output = module()
        assert output.shape == (2,)
        (output * (rank + 2)).sum().backward()
        gradient = module.st.local_tensor().grad
        assert gradient is not None
        return gradient.flatten().tolist()

    assert on(2, program) == [[2, 2], [3, 3]]


def test_local_shard_of_a_grid_keeps_its_dims() -> None:
    def program(rank: int) -> tuple[int, ...]:
        output: Tensor = collect_local_shard(Holder(grid([1, 1], [2], [0, 1]), 2, 2))()
        return tuple(output.shape)

    assert on(2, program) == [(1, 2), (1, 2)]


def test_several_local_shards_have_no_one_tensor() -> None:
    def program(rank: int) -> None:
        module = collect_local_shard(Holder(chunks(0, [0, 0]), 4))
        with pytest.raises(NotImplementedError, match=r"Only single local shard is supported\."):
            module()

    on(1, program)


def test_one_after_the_other() -> None:
    def program(rank: int) -> Any:
        module = collect_local_shard(reshard_output(Same(), chunks(1, [1, 0])))
        return module(cut(numbered((2, 6)), chunks(0, [0, 1]), rank)).tolist()

    assert on(2, program) == [[[3, 4, 5], [9, 10, 11]], [[0, 1, 2], [6, 7, 8]]]


def test_hooked_modules_are_pickled_and_copied() -> None:
    def program(rank: int) -> None:
        module = reshard_output(Same(), chunks(1, [0]))
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        table = cut(numbered((2, 6)), chunks(0, [0]), rank)
        for made in (torch.load(file, weights_only=False), copy.deepcopy(module)):
            assert made(table).sharding_spec() == chunks(1, [0])

    on(1, program)


def test_what_is_no_spec() -> None:
    with pytest.raises(ValueError, match="Expecting ShardingSpec but got: int"):
        reshard_output(Same(), 3)  # type: ignore[arg-type]
