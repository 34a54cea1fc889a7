"""From plain tensors to sharded ones without communication, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilework.distributed as dist
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
    from_full_tensor,
    zeros,
)
from tilework.testing import run_ranks

GRID = EnumerableShardingSpec(
    ShardMetadata([3 * (i // 2), 2 * (i % 2)], [3, 2], f"rank:{i % 3}/cpu") for i in range(4)
)


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.data(),
)
def test_there_and_back(size: list[int], ranks: list[int], data: st.DataObject) -> None:
    spec = chunks(data.draw(st.integers(-len(size), len(size) - 1)), *ranks)
    whole = torch.arange(torch.Size(size).numel()).reshape(size)

    def program(_: int) -> torch.Tensor:
        return from_full_tensor(whole, spec).full_tensor()

    for found in run_ranks(3, program):
        assert torch.equal(found, whole)


def test_a_grid_with_several_shards_on_a_rank() -> None:
    whole = torch.randn(6, 4)
    found = run_ranks(3, lambda _: from_full_tensor(whole, GRID).full_tensor())
    assert all(torch.equal(each, whole) for each in found)


def test_nothing_is_communicated() -> None:
    """One rank alone makes it; it would wait for the others otherwise."""

    def program(rank: int) -> Any:
        return from_full_tensor(torch.arange(4), chunks(0, 0, 1)).local_tensor() if rank else None

    assert run_ranks(2, program)[1].tolist() == [2, 3]


def test_the_result_is_a_leaf_of_its_own() -> None:
    def program(rank: int) -> Any:
        whole = torch.ones(4, requires_grad=True)
        made = from_full_tensor(whole, chunks(0, 0, 1))
        with torch.no_grad():
            whole.zero_()
        tile = made.local_tensor()
        return made.requires_grad, tile.requires_grad, tile.is_leaf, tile.tolist()

    assert run_ranks(2, program) == [(True, True, True, [1.0, 1.0])] * 2


def test_dtype_group_and_placement() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([1, 2])
        whole = torch.ones(5, dtype=torch.bfloat16)
        made = from_full_tensor(whole, chunks(0, 2, 1), group)
        return made.dtype, [shard.tensor.numel() for shard in made.local_shards()]

    assert run_ranks(3, program) == [(torch.bfloat16, n) for n in ([], [2], [3])]


def test_a_rank_without_shards_needs_no_values() -> None:
    def program(rank: int) -> torch.Tensor:
        whole = torch.ones(4) if rank == 0 else torch.ones(4, device="meta")
        return from_full_tensor(whole, chunks(0, 0)).full_tensor()

    assert [found.tolist() for found in run_ranks(2, program)] == [[1.0] * 4] * 2


def test_what_cannot_be_converted() -> None:
    def program(rank: int) -> None:
        spec = chunks(0, 0, 1)
        with pytest.raises(TypeError, match="got list"):
            from_full_tensor([1, 2], spec)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"use its reshard\(spec\)"):
            from_full_tensor(zeros(spec, 4), spec)
        with pytest.raises(ValueError, match="Invalid sharding dim"):
            from_full_tensor(torch.ones(4), chunks(1, 0, 1))
        with pytest.raises(ValueError, match="Global rank 5 does not exist"):
            from_full_tensor(torch.ones(4), chunks(0, 5))

    run_ranks(2, program)
