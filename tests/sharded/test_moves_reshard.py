"""Resharding: from any cut to any other, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    cut,
    examples,
    grid,
    join,
    numbered,
    on,
    parts_of,
    specs,
)
from tests.tables import each
from tilework import sharded
from tilework.sharded import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)


def check_is(tensor: ShardedTensor, whole: torch.Tensor, spec: ShardingSpec, rank: int) -> None:
    """``tensor`` is what it would be had ``whole`` been cut so."""
    expected = cut(whole, spec, rank, requires_grad=tensor.requires_grad)
    assert tensor.sharding_spec() == spec
    assert tensor.metadata() == expected.metadata()
    assert tensor.tiling == expected.tiling
    for mine, theirs in zip(tensor.local_shards(), expected.local_shards(), strict=True):
        assert mine.metadata == theirs.metadata
        assert torch.equal(mine.tensor, theirs.tensor)
        assert mine.tensor.is_contiguous()


@given(hs.data())
@examples(60)
def test_any_cut_to_any_other(data: hs.DataObject) -> None:
    size = tuple(data.draw(hs.lists(hs.integers(0, 7), min_size=1, max_size=3)))
    ranks = hs.sampled_from([(0, 1, 2), (0,), (1, 2), (2, 0)])
    way = [data.draw(specs(size, data.draw(ranks))) for _ in range(3)]
    kinds = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    whole = numbered(size, data.draw(hs.sampled_from(kinds)))
    graded = whole.is_floating_point() and data.draw(hs.booleans())

    def program(rank: int) -> Any:
        tensor = cut(whole, way[0], rank, requires_grad=graded)
        for spec in way[1:]:
            assert tensor.reshard(spec) is tensor
            check_is(tensor, whole, spec, rank)
            assert tensor.requires_grad is graded
            for tile in tensor.local_tiles():
                assert (tile.requires_grad, tile.is_leaf, tile.grad) == (graded, True, None)
        return parts_of(tensor)

    found = on(3, program)
    assert torch.equal(join([part for parts in found for part in parts], size), whole)


def test_within_a_group() -> None:
    whole = numbered([7, 2])

    def program(rank: int) -> None:
        group = dist.new_group([1, 3])
        tensor = cut(whole, chunks(0, [1, 3]), rank, process_group=group)
        tensor.reshard(chunks(1, [3, 1]))  # also on ranks outside it
        assert tensor.sharding_spec() == chunks(1, [3, 1])
        assert tensor.process_group is group
        assert len(tensor.local_shards()) == (rank in (1, 3))
        if rank in (1, 3):
            assert torch.equal(tensor.full_tensor(), whole)

    on(4, program)


def test_a_parameter_stays_one() -> None:
    def program(rank: int) -> None:
        parameter = torch.nn.Parameter(cut(numbered([4]), chunks(0, [0, 1]), rank))
        assert isinstance(parameter, ShardedTensor)
        assert parameter.reshard(chunks(0, [1, 0])) is parameter
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.local_tensor().requires_grad

    on(2, program)


def test_a_tensor_and_its_copy_are_resharded_apart() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), chunks(0, [0, 1]), rank)
        before = tensor.like(tensor.local_tiles())
        tensor.reshard(chunks(0, [1, 0]))
        assert before.sharding_spec() == chunks(0, [0, 1])
        assert torch.equal(before.full_tensor(), tensor.full_tensor())

    on(2, program)


def test_metas_stay_metas() -> None:
    def program(rank: int) -> None:
        tensor = sharded.empty(chunks(0, [0, 1], "meta"), 1 << 30, 4)
        tensor.reshard(chunks(1, [1, 0, 0], "meta"))
        assert [tile.shape[1] for tile in tensor.local_tiles()] == [[2, 0], [2]][rank]
        assert tensor.is_meta

    on(2, program)


def test_gradients_of_metas_are_metas() -> None:
    def program(rank: int) -> None:
        leaf = sharded.ones(chunks(0, [0, 1], "meta"), 4, requires_grad=True)
        moved = leaf.resharded(chunks(0, [1, 1, 1], "meta"))
        moved.full_tensor()
        tiles = moved.local_tiles()
        if rank == 1:
            torch.autograd.backward([tile.sum() for tile in tiles])
            gradient = leaf.local_tensor().grad
            assert gradient is not None
            assert gradient.is_meta

    on(2, program)


def test_metas_have_no_values_to_move() -> None:
    def program(rank: int) -> None:
        sharded.empty(chunks(0, [0, 1], "meta"), 4).reshard(chunks(0, [0, 1]))

    check_all_raise(2, program, ValueError, "has no values to move")


def test_devices_follow_the_placements() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), chunks(0, [0, 1]), rank)
        tensor.reshard(chunks(0, [0, 1], "meta"))
        assert tensor.local_tensor().is_meta
        assert tensor.metadata() == sharded.empty(chunks(0, [0, 1], "meta"), 4).metadata()

    on(2, program)


class Refusing(ShardingSpec):
    """Fails where it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        if dist.get_rank() == self.rank:
            raise ValueError("not here")
        return chunks(0, [0, 1]).build_metadata(tensor_sizes, tensor_properties)


@each(
    ("spec", "kind", "message"),
    [
        ("columns", ValueError, "Expecting ShardingSpec but got: str"),
        (chunks(2, [0, 1]), ValueError, "Invalid sharding dim"),
        (chunks(0, [0, 5]), ValueError, "Global rank 5 does not exist"),
        (boxes(([0, 0], [4, 2], 0)), ValueError, "does not match tensor volume"),
        (chunks(0, [1, 0]), ValueError, "does not match with resharding_spec="),
        (Refusing(1), ValueError, "not here"),
    ],
)
def test_a_reshard_that_fails_leaves_all_as_it_was(
    spec: Any, kind: type[Exception], message: str
) -> None:
    whole = numbered([4, 3])

    def program(rank: int) -> None:
        tensor = cut(whole, chunks(1, [0, 1]), rank)
        metadata, tiles = tensor.metadata(), tensor.local_tiles()
        with pytest.raises(kind, match=message):
            tensor.reshard(spec if rank else chunks(0, [0, 1]))  # wrong on rank 1 only
        assert tensor.metadata() is metadata
        assert all(now is then for now, then in zip(tensor.local_tiles(), tiles, strict=True))
        assert torch.equal(tensor.reshard(chunks(0, [1, 0])).full_tensor(), whole)

    on(2, program)


def test_shards_without_placement_cannot_be_moved_to() -> None:
    spec = sharded.EnumerableShardingSpec([ShardMetadata([0], [4])])
    check_all_raise(
        2,
        lambda rank: cut(numbered([4]), chunks(0, [0, 1]), rank).reshard(spec),
        ValueError,
        "remote device is None",
    )


# -- gradients ---------------------------------------------------------------------------------


@each("in_place", [True, False])
@each(
    ("first", "second"),
    [
        (chunks(0, [0, 1, 2]), chunks(1, [2, 0])),
        (chunks(1, [1]), grid([2, 3], [1, 3], [0, 2])),
        (chunks(0, [0, 2, 0, 2, 0, 2, 0]), chunks(0, [1])),
    ],
)
def test_gradients_flow_back_through_a_result_that_was_resharded(
    first: ShardingSpec, second: ShardingSpec, in_place: bool
) -> None:
    whole = numbered([5, 4])

    def program(rank: int) -> None:
        leaf = cut(whole, first, rank, requires_grad=True)
        result: Any = leaf * leaf
        moved = result.reshard(second) if in_place else result.resharded(second)
        assert (moved is result) == in_place
        assert moved.requires_grad
        assert moved.metadata() == cut(whole, second, rank, requires_grad=True).metadata()
        assert torch.equal(moved.full_tensor(), whole * whole)
        (moved * cut(whole, second, rank)).sum().backward()
        for shard in leaf.local_shards():
            assert shard.tensor.grad is not None
            expected = (2 * whole * whole)[shard.metadata.box.slices]
            assert_close(shard.tensor.grad, expected)

    on(3, program)


def test_a_leaf_that_is_resharded_elsewhere_gets_gradients() -> None:
    def program(rank: int) -> None:
        leaf = cut(numbered([4]), chunks(0, [0, 0]), rank, requires_grad=True)
        moved: Any = leaf.resharded(chunks(0, [1]))
        assert leaf.sharding_spec() == chunks(0, [0, 0])
        (moved * moved).full_tensor().sum().backward()
        assert [tile.grad.tolist() for tile in leaf.local_tiles() if tile.grad is not None] == (
            [[0.0, 2.0], [4.0, 6.0]] if rank == 0 else []
        )
        with torch.no_grad():
            assert torch.equal(leaf.resharded(chunks(0, [1])).full_tensor(), numbered([4]))

    on(2, program)


def test_a_leaf_that_is_resharded_in_place_stays_a_leaf() -> None:
    def program(rank: int) -> None:
        leaf = cut(numbered([4]), chunks(0, [0, 1]), rank, requires_grad=True)
        leaf.reshard(chunks(0, [1, 0]))
        leaf.sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.is_leaf
        assert [tile.grad.tolist() for tile in leaf.local_tiles() if tile.grad is not None] == [
            [1.0, 1.0]
        ]

    on(2, program)
