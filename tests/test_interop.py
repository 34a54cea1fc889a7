"""Between sharded tensors and DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    to_dtensor,
    to_sharded,
)
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardMetadata,
    shard_tensor,
)
from tilework.testing import run_ranks

WHOLE = torch.arange(35.0).view(7, 5)

LAYOUTS: list[tuple[tuple[int, ...], list[Placement], Any]] = [
    ((4,), [Shard(0)], None),
    ((4,), [Shard(1)], None),
    ((4,), [Shard(0, sizes=(3, 0, 1, 3))], None),
    ((2, 2), [Shard(0), Shard(1)], None),
    ((2, 2), [Shard(0), Shard(0)], None),
    ((2, 2), [Shard(1), Shard(1)], (1, 0)),
    ((2, 2), [Shard(1, sizes=(1, 4)), Shard(0)], None),
    ((4, 1), [Shard(0), Replicate()], None),
]


def test_there_and_back_with_the_same_memory() -> None:
    def program(rank: int) -> None:
        meshes = {shape: init_device_mesh("cpu", shape) for shape, _, _ in LAYOUTS}
        for shape, placements, order in LAYOUTS:
            there = distribute_tensor(WHOLE, meshes[shape], placements, order=order)
            sharded = to_sharded(there)
            assert isinstance(sharded, ShardedTensor)
            assert torch.equal(sharded.full_tensor(), WHOLE)
            back = to_dtensor(sharded, meshes[shape])
            assert isinstance(back, DTensor)
            assert torch.equal(back.full_tensor(), WHOLE)
            assert back.to_local().data_ptr() == there.to_local().data_ptr()

    run_ranks(4, program)


def test_writes_to_a_shard_are_seen_by_views_that_moved() -> None:
    def program(rank: int) -> None:
        base = distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(1)])
        view: Any = base.flatten()  # a copy
        (shard,) = to_sharded(base.data).local_shards()
        shard.tensor.add_(1)
        with pytest.raises(RuntimeError, match="make the view again"):
            view.full_tensor()
        assert torch.equal(base.full_tensor(), WHOLE + 1)

    run_ranks(2, program)


def test_gradients_flow_through() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        leaf = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
        made: Any = leaf * 2
        torch.autograd.backward(to_dtensor(to_sharded(made), mesh).sum())
        assert isinstance(leaf.grad, DTensor)
        assert leaf.grad.full_tensor().tolist() == [[2, 2]] * 4

    run_ranks(2, program)


def test_other_ranks_orders_and_what_no_mesh_writes() -> None:
    def program(rank: int) -> None:
        swapped = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
        sharded = shard_tensor(WHOLE, swapped)
        found = to_dtensor(sharded, DeviceMesh("cpu", [1, 0]))
        assert torch.equal(found.full_tensor(), WHOLE)
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="no placements on"):
            to_dtensor(sharded, mesh)
        twice = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:0/cpu"])
        with pytest.raises(ValueError, match="several shards on rank 0"):
            to_dtensor(shard_tensor(WHOLE, twice), mesh)
        with pytest.raises(ValueError, match="none on ranks \\[1\\]"):
            to_dtensor(shard_tensor(WHOLE, ChunkShardingSpec(0, ["rank:0/cpu"])), mesh)
        with pytest.raises(ValueError, match="a shard on rank"):
            to_dtensor(sharded, DeviceMesh("cpu", [0]))
        with pytest.raises(TypeError, match="takes a ShardedTensor"):
            to_dtensor(WHOLE, mesh)

    run_ranks(2, program)


def test_a_grid_that_is_uneven_inside_is_refused() -> None:
    boxes = [([0, 0], [4, 2]), ([0, 2], [4, 3]), ([4, 0], [3, 3]), ([4, 3], [3, 2])]
    spec = EnumerableShardingSpec(
        ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")
        for rank, (offsets, sizes) in enumerate(boxes)
    )

    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="no placements on"):
            to_dtensor(shard_tensor(WHOLE, spec), init_device_mesh("cpu", (2, 2)))

    run_ranks(4, program)


def test_parts_that_several_ranks_have_are_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        cases: list[list[Placement]] = [[Shard(0), Replicate()], [Partial(), Shard(0)]]
        for placements in cases:
            with pytest.raises(ValueError, match="has each element once"):
                to_sharded(distribute_tensor(WHOLE, mesh, placements))
        with pytest.raises(TypeError, match="takes a DTensor"):
            to_sharded(WHOLE)

    run_ranks(4, program)


def test_a_sharded_tensor_and_a_dtensor_in_one_operator() -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        other: Any = shard_tensor(torch.ones(4, 3), ChunkShardingSpec(0, ["rank:0/cpu"]))
        for meet in (lambda: x + other, lambda: x == other, lambda: torch.cat([x, other])):
            with pytest.raises(RuntimeError, match=r"the ShardedTensor with to_dtensor\(\)"):
                meet()

    run_ranks(2, program)
