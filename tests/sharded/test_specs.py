"""Sharding specs: the metadata that they build, what they refuse, and finding one from metadata."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

from tests.sharded.ranks_and_specs import boxes, chunks, examples, grid, numbered, on, specs
from tests.tables import each
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    infer_sharding_spec_from_shards_metadata,
    validate_non_overlapping_shards_metadata,
)


def built(spec: ShardingSpec, *size: int) -> list[tuple[list[int], list[int], str]]:
    metadata = spec.build_metadata(size, TensorProperties())
    return [
        (list(shard.shard_offsets), list(shard.shard_sizes), str(shard.placement))
        for shard in metadata.shards_metadata
    ]


# -- chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, -2])
def test_chunks_have_the_same_size_but_for_the_last(dim: int) -> None:
    assert built(chunks(dim, range(4)), 10, 20) == [
        ([0, 0], [3, 20], "rank:0/cpu"),
        ([3, 0], [3, 20], "rank:1/cpu"),
        ([6, 0], [3, 20], "rank:2/cpu"),
        ([9, 0], [1, 20], "rank:3/cpu"),
    ]


@pytest.mark.parametrize("dim", [1, -1])
def test_chunks_of_columns(dim: int) -> None:
    assert [(o, s) for o, s, _ in built(chunks(dim, range(4)), 10, 32)] == [
        ([0, 8 * i], [10, 8]) for i in range(4)
    ]


def test_more_chunks_than_rows_leave_empty_ones_behind_the_end() -> None:
    assert [(o, s) for o, s, _ in built(chunks(0, range(4)), 2, 20)] == [
        ([0, 0], [1, 20]), ([1, 0], [1, 20]), ([2, 0], [0, 20]), ([3, 0], [0, 20]),
    ]  # fmt: skip
    assert [(o, s) for o, s, _ in built(chunks(0, range(3)), 0)] == [([0], [0])] * 3


def test_a_rank_may_have_several_chunks_and_others_none() -> None:
    assert [(o, p) for o, _, p in built(chunks(0, [2, 0, 2]), 6)] == [
        ([0], "rank:2/cpu"), ([2], "rank:0/cpu"), ([4], "rank:2/cpu"),
    ]  # fmt: skip


@given(hs.integers(0, 40), hs.integers(1, 9))
@examples(100)
def test_chunks_are_those_of_torch(extent: int, n: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(extent).chunk(n)]
    sizes = [sizes[0] for _, sizes, _ in built(chunks(0, range(n)), extent)]
    assert [size for size in sizes if size] == [size for size in expected if size]
    assert sum(sizes) == extent


def test_names_of_dims_are_not_supported() -> None:
    with pytest.raises(NotImplementedError, match="does not support named dimension"):
        ChunkShardingSpec("H", ["rank:1/cpu"])  # type: ignore[arg-type]


@each("dim", [None, 1.5, True, (0,)])
def test_other_dims_are_refused(dim: object) -> None:
    with pytest.raises(ValueError, match="Sharding dim needs to be an integer"):
        ChunkShardingSpec(dim, ["rank:1/cpu"])  # type: ignore[arg-type]


@each("dim", [2, 3, 4, -3, -4, -5])
def test_dims_that_the_tensor_does_not_have(dim: int) -> None:
    with pytest.raises(ValueError, match=f"Invalid sharding dim: {dim} "):
        built(chunks(dim, [1]), 10, 20)


def test_a_scalar_has_no_dim_to_cut() -> None:
    with pytest.raises(ValueError, match="Invalid sharding dim"):
        built(chunks(0, [1]))


def test_a_size_has_no_negative_extent() -> None:
    with pytest.raises(ValueError, match="sizes must be 0 or more"):
        built(chunks(0, [0]), 4, -1)


def test_one_spec_cuts_any_number_of_sizes() -> None:
    spec = chunks(-1, [0, 1])
    for _ in range(2):
        for extent in range(50):
            assert built(spec, extent) == built(chunks(0, [0, 1]), extent)
            assert built(spec, 3, extent) == built(chunks(1, [0, 1]), 3, extent)
    assert spec == chunks(-1, [0, 1]) == pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec)
    assert hash(spec) == hash(chunks(-1, [0, 1]))


def test_placements_are_parsed_at_once() -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        ChunkShardingSpec(0, ["rank:one/cpu"])
    with pytest.raises(ValueError, match="placements must not be empty"):
        ChunkShardingSpec(0, [])


# -- boxes -------------------------------------------------------------------------------------


def test_boxes_are_built_as_they_were_given() -> None:
    spec = boxes(([0, 0], [2, 4], 0), ([0, 4], [4, 2], 1), ([2, 0], [4, 4], 2), ([4, 4], [2, 2], 3))
    assert spec.build_metadata((6, 6), TensorProperties()).shards_metadata == spec.shards


def test_boxes_must_not_overlap() -> None:
    with pytest.raises(ValueError, match="overlap"):
        boxes(([0, 0], [5, 5], 0), ([4, 4], [5, 5], 1))


def test_boxes_must_cover_the_tensor() -> None:
    spec = boxes(([0, 0], [5, 5], 0), ([5, 0], [5, 5], 1))
    with pytest.raises(ValueError, match="does not match tensor volume") as caught:
        built(spec, 24, 12)
    assert "do not cover the entire tensor" in str(caught.value)


def test_boxes_must_be_inside_the_tensor() -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        built(boxes(([0, 0], [5, 5], 0), ([5, 0], [5, 5], 1)), 9, 5)


def test_boxes_must_have_the_tensors_dims() -> None:
    with pytest.raises(ValueError, match="dims"):
        built(boxes(([0, 0], [5, 5], 0)), 25)
    with pytest.raises(ValueError, match="Found inconsistent numbers of dims"):
        EnumerableShardingSpec([ShardMetadata([0], [1]), ShardMetadata([0, 1], [1, 1])])


def test_no_boxes() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        EnumerableShardingSpec([])


def test_overlap_alone() -> None:
    shards = [ShardMetadata([0], [3]), ShardMetadata([5], [3]), ShardMetadata([9], [0])]
    validate_non_overlapping_shards_metadata(shards)  # a gap is none of its business
    with pytest.raises(ValueError, match="overlap"):
        validate_non_overlapping_shards_metadata([*shards, ShardMetadata([7], [2])])


# -- values ------------------------------------------------------------------------------------


def test_specs_are_values() -> None:
    specs = {chunks(0, [0, 1]), chunks(1, [0, 1]), chunks(0, [1, 0]), grid([2], [1, 1], [0, 1])}
    assert len(specs) == 4
    for spec in specs:
        assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
        assert hash(copy.copy(spec)) == hash(spec)


def test_specs_on_other_devices() -> None:
    meta = torch.device("meta")
    assert chunks(0, [0, 1]).moved(meta) == chunks(0, [0, 1], "meta")
    moved = grid([2], [1, 1], [0, 1]).moved(meta).build_metadata((2, 2), TensorProperties())
    assert [str(shard.placement) for shard in moved.shards_metadata] == [
        "rank:0/meta",
        "rank:1/meta",
    ]


def test_a_device_without_an_index_leaves_those_of_its_kind_where_they_are() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cpu"])
    moved = spec.moved(torch.device("cuda"))
    assert [str(p) for p in moved.placements] == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda"]


@dataclass(frozen=True)
class Halves(ShardingSpec):
    """A user's own: two halves of dim 0."""

    first: int
    second: int

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        spec = chunks(0, [self.first, self.second])
        return spec.build_metadata(tensor_sizes, tensor_properties)


def test_a_users_spec_can_be_moved_too() -> None:
    moved = Halves(3, 1).moved(torch.device("meta"))
    assert built(moved, 4) == [([0], [2], "rank:3/meta"), ([2], [2], "rank:1/meta")]
    assert moved == Halves(3, 1).moved(torch.device("meta"))
    assert pickle.loads(pickle.dumps(moved)) == moved


def test_a_spec_shards_a_tensor_of_one_rank() -> None:
    whole = numbered([5, 3])

    def program(rank: int) -> None:
        given = whole if rank == 1 else torch.empty(5, 3)
        for spec in (chunks(0, [0, 1]), grid([2, 3], [3], [1, 0]), Halves(1, 0)):
            made = spec.shard(given, src_rank=1)
            assert made.sharding_spec() is spec
            assert torch.equal(made.full_tensor(), whole)

    on(2, program)


# -- inference ---------------------------------------------------------------------------------


def inferred(spec: ShardingSpec, *size: int) -> ShardingSpec:
    shards = spec.build_metadata(size, TensorProperties()).shards_metadata
    return infer_sharding_spec_from_shards_metadata(shards)


@each(
    ("spec", "size"),
    [
        (chunks(0, range(4)), (10, 20)),
        (chunks(1, range(4)), (10, 20)),
        (chunks(1, [0, 1, 0]), (4, 7, 2)),
        (chunks(0, range(4)), (2, 20)),
        (chunks(2, [3, 1]), (2, 3, 4)),
        (grid([5, 5], [5, 5], range(4)), (10, 10)),
        (grid([3, 7], [10], [0, 1]), (10, 10)),
        (boxes(([0, 0], [10, 5], 0), ([0, 5], [4, 5], 1), ([4, 5], [6, 5], 0)), (10, 10)),
    ],
)
def test_the_spec_is_found_from_the_metadata(spec: ShardingSpec, size: tuple[int, ...]) -> None:
    assert inferred(spec, *size) == spec


def test_chunks_may_come_in_any_order() -> None:
    shards = chunks(0, [3, 1, 2]).build_metadata((7, 2), TensorProperties()).shards_metadata
    for order in ((2, 1, 0), (1, 2, 0)):
        found = infer_sharding_spec_from_shards_metadata([shards[i] for i in order])
        assert found == chunks(0, [3, 1, 2])


def test_shards_without_placement_are_listed() -> None:
    shards = [ShardMetadata([0], [2]), ShardMetadata([2], [2])]
    assert infer_sharding_spec_from_shards_metadata(shards) == EnumerableShardingSpec(shards)


def test_no_shards_have_no_spec() -> None:
    with pytest.raises(ValueError, match="shards_metadata must not be empty"):
        infer_sharding_spec_from_shards_metadata([])


@given(hs.data())
@examples(150)
def test_what_is_found_cuts_the_tensor_alike(data: hs.DataObject) -> None:
    size = tuple(data.draw(hs.lists(hs.integers(0, 6), min_size=1, max_size=3)))
    spec = data.draw(specs(size, (0, 1, 2)))
    found = inferred(spec, *size)
    first, second = built(spec, *size), built(found, *size)
    assert sorted(first) == sorted(second)
