"""Tensors of what each rank brings. What is wrong on one rank raises on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    cut,
    errors_of,
    examples,
    grid,
    numbered,
    on,
    quarter,
    specs,
)
from tests.tables import each
from tilework.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    init_from_local_shards,
)
from tilework.testing import run_ranks

init_from_local_tensor = ShardedTensor.init_from_local_tensor
with_metadata = ShardedTensor.from_local_shards_and_global_metadata


def shard(rank: int, offsets: Any, sizes: Any, **options: Any) -> Shard:
    place = ShardMetadata(offsets, sizes, f"rank:{rank}/{options.get('device', 'cpu')}")
    return Shard(torch.ones(*sizes, **options), place)


# -- from shards -------------------------------------------------------------------------------


def test_four_quarters() -> None:
    def program(rank: int) -> Any:
        mine = quarter(rank)
        made = init_from_local_shards([mine], 10, 10)
        assert made.local_tensor() is mine.tensor
        assert made.local_shards()[0].metadata == mine.metadata
        assert made.size() == (10, 10)
        assert made.metadata().shards_metadata == [quarter(r).metadata for r in range(4)]
        assert made.sharding_spec() == grid([5, 5], [5, 5], range(4))
        return made.metadata()

    found = on(4, program)
    assert found == found[:1] * 4


def test_chunks_in_any_order_are_a_chunk_spec() -> None:
    def program(rank: int) -> Any:
        made = init_from_local_shards([shard(rank, [5 * (1 - rank), 0], [5, 2])], [10, 2])
        assert made.metadata() == cut(torch.ones(10, 2), chunks(0, [1, 0]), rank).metadata()
        return made.sharding_spec()

    assert on(2, program) == [chunks(0, [1, 0])] * 2


def test_ranks_may_bring_nothing_or_several() -> None:
    def program(rank: int) -> Any:
        bring = {0: [shard(0, [4, 0], [2, 3]), shard(0, [0, 0], [4, 3])], 1: [],
                 2: [shard(2, [6, 0], [1, 3])]}  # fmt: skip
        made = init_from_local_shards(bring[rank], [7, 3])
        assert [tile.shape for tile in made.local_tiles()] == [s.tensor.shape for s in bring[rank]]
        return made.metadata()

    found = on(3, program)
    assert found == found[:1] * 3


def test_properties_come_from_a_rank_that_has_shards() -> None:
    def program(rank: int) -> None:
        mine = [shard(1, [0], [4], dtype=torch.float64, requires_grad=True)] if rank else []
        made = init_from_local_shards(mine, 4)
        assert (made.dtype, made.requires_grad, made.shape) == (torch.float64, True, (4,))
        assert made.metadata().tensor_properties == TensorProperties(
            torch.float64, requires_grad=True
        )

    on(2, program)


def test_in_groups_of_some_ranks() -> None:
    def program(rank: int) -> None:
        members = [r for r in range(4) if r % 2 == rank % 2]
        group = dist.new_group(members, use_local_synchronization=True)
        mine = shard(rank, [3 * (rank // 2)], [3], device="meta")
        made = init_from_local_shards([mine], 6, process_group=group)
        assert made.sharding_spec() == chunks(0, members, "meta")
        assert made.process_group is group

    on(4, program)


def test_ranks_outside_the_group_cannot_know() -> None:
    def program(rank: int) -> ShardedTensor:
        group = dist.new_group([1, 2, 3])
        mine = [shard(rank, [5 * (rank - 1), 0], [5, 5])] if rank else []
        return init_from_local_shards(mine, [15, 5], process_group=group)

    errors = errors_of(4, program)
    assert isinstance(errors[0], ValueError)
    assert "rank 0 is not in the group of ranks [1, 2, 3]" in str(errors[0])
    assert errors[1:] == [None] * 3


@given(hs.data())
@examples(25)
def test_what_was_cut_can_be_joined_again(data: hs.DataObject) -> None:
    size = tuple(data.draw(hs.lists(hs.integers(1, 6), min_size=1, max_size=3)))
    spec = data.draw(specs(size, (0, 1, 2)))

    def program(rank: int) -> Any:
        first = cut(numbered(size), spec, rank)
        made = init_from_local_shards(first.local_shards(), size)
        key = [(s.box.offsets, s.box.sizes) for s in made.metadata().shards_metadata]
        assert [s.metadata for s in made.local_shards()] == [
            part
            for part, tile in zip(made.metadata().shards_metadata, made.tiling.tiles, strict=True)
            if tile.owners == (rank,)
        ]
        return sorted(key), made.metadata()

    found = on(3, program)
    assert found == found[:1] * 3


DIFFERS = "property does not match from different ranks!"
#: What the third rank brings, the size that it says, and the error.
WRONG: dict[str, tuple[Any, Any, str]] = {
    "sparse": (
        lambda r: [Shard(torch.ones(5, 5).to_sparse(), quarter(r).metadata)], [10, 10],
        "Only torch.strided layout is currently supported"),
    "strides": (
        lambda r: [Shard(torch.ones(5, 5).t(), quarter(r).metadata)], [10, 10],
        "Only torch.contiguous_format memory_format is currently supported"),
    "another rank's": (
        lambda r: [quarter((r + 1) % 4)], [10, 10],
        "Local shard metadata's rank does not match with the rank in its process group"),
    "not in the group": (
        lambda r: [shard(7, [0, 0], [5, 5])], [10, 10],
        "Global rank 7 does not exist in input process group"),
    "no placement": (
        lambda r: [Shard(torch.ones(5, 5), ShardMetadata([0, 0], [5, 5]))], [10, 10],
        "remote device is None"),
    "own dtypes": (
        lambda r: [quarter(r), quarter(r, dtype=torch.int32)], [10, 10],
        "Local shards' tensor dtype property need to be the same on rank:2!"),
    "own requires_grad": (
        lambda r: [quarter(r), quarter(r, requires_grad=True)], [10, 10],
        "Local shards' tensor requires_grad property need to be the same on rank:2!"),
    "size": (lambda r: [quarter(r)], [10, 5], f"global_size {DIFFERS}"),
    "size of a rank without shards": (lambda r: [], [10, 5], f"global_size {DIFFERS}"),
    "no size": (lambda r: [quarter(r)], ["ten"], "size must be a sequence of ints"),
    "dtype": (lambda r: [quarter(r, dtype=torch.int32)], [10, 10], f"dtype {DIFFERS}"),
    "gradients": (
        lambda r: [quarter(r, requires_grad=True)], [10, 10], f"requires_grad {DIFFERS}"),
    "overlap": (lambda r: [shard(r, [5, 0], [5, 6])], [10, 10], "overlap"),
    "gap": (lambda r: [shard(r, [5, 0], [4, 5])], [10, 10], "does not match tensor volume"),
    "missing": (lambda r: [], [10, 10], "does not match tensor volume"),
    "out of bounds": (lambda r: [shard(r, [5, 0], [9, 5])], [10, 10], "out of bounds"),
    "dims": (lambda r: [shard(r, [5], [5])], [10, 10], "dims"),
}  # fmt: skip


@each("what", WRONG)
def test_one_wrong_rank_raises_on_all(what: str) -> None:
    bring, size, message = WRONG[what]

    def program(rank: int) -> None:
        if rank == 2:
            init_from_local_shards(bring(rank), size)
        else:
            init_from_local_shards([quarter(rank)], [10, 10])

    kind = TypeError if what == "no size" else ValueError
    check_all_raise(4, program, kind, message)


def test_one_wrong_process_raises_on_all() -> None:
    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="dtype property does not match") as caught:
            init_from_local_shards(
                [shard(rank, [rank], [1], dtype=(torch.int32, torch.float32)[rank])], [2]
            )
        assert init_from_local_shards([shard(rank, [rank], [1])], [2]).shape == (2,)
        return str(caught.value)

    first, second = run_ranks(2, program, kind="processes")
    assert first == second


def test_nobody_has_shards() -> None:
    check_all_raise(
        4,
        lambda _: init_from_local_shards([], [10, 10]),
        ValueError,
        "have no local shards on all ranks",
    )


def test_pinned_and_unpinned_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing can be pinned without an accelerator; the checks ask this method.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: bool(tensor.sum() > 25))
    check_all_raise(
        1,
        lambda r: init_from_local_shards(
            [shard(0, [0, 0], [5, 5]), shard(0, [5, 0], [5, 6])], [10, 10]
        ),
        ValueError,
        "Local shards' tensor pin_memory property need to be the same",
    )
    check_all_raise(
        2,
        lambda r: init_from_local_shards([shard(r, [5 * r, 0], [5, 5 + r])], [10, 10]),
        ValueError,
        "ShardedTensor pin_memory property does not match from different ranks!",
    )


# -- from one tensor ---------------------------------------------------------------------------


@each(
    "spec",
    [chunks(0, range(4)), chunks(1, [2, 1, 3, 0]), chunks(1, range(4)), chunks(0, [3, 0, 1, 2])],
)
@each("size", [[20, 10], [21, 11], [23, 16], [44, 16, 8], [3, 2]])
def test_one_tensor_on_each_rank(spec: ChunkShardingSpec, size: list[int]) -> None:
    def program(rank: int) -> None:
        expected = cut(numbered(size), spec, rank)
        mine = expected.local_tensor().clone()
        made = init_from_local_tensor(mine, spec, size)
        assert made.size() == tuple(size)
        assert made.local_tensor() is mine
        assert made.metadata() == expected.metadata()
        assert made.local_shards()[0].metadata == expected.local_shards()[0].metadata
        assert made.sharding_spec() is spec

    on(4, program)


def test_one_box_on_some_ranks() -> None:
    spec = boxes(([0, 0], [2, 3], 2), ([2, 0], [4, 3], 0))

    def program(rank: int) -> None:
        mine = {0: torch.ones(4, 3), 2: torch.ones(2, 3)}.get(rank)
        made = init_from_local_tensor(mine, spec, 6, 3)
        assert len(made.local_shards()) == (rank != 1)
        assert torch.equal(made.full_tensor(), torch.ones(6, 3))

    on(3, program)


TENSOR_ERRORS: dict[str, tuple[Any, ShardingSpec, str]] = {
    "cover": (
        torch.ones(24, 12), boxes(([0, 0], [5, 5], 0), ([5, 0], [5, 5], 1)),
        "do not cover the entire tensor"),
    "strides": (
        torch.ones(12, 12).t(), chunks(0, [0, 1]), "local_tensor is not a contiguous Tensor."),
    "size": (torch.ones(11, 12), chunks(0, [0, 1]), "Shard tensor size does not match"),
    "dtype": (
        torch.ones(12, 12, dtype=torch.int8), chunks(0, [0, 1]), "ShardedTensor dtype property"),
    "spec": (torch.ones(12, 12), chunks(0, [1, 0]), "ShardedTensor sharding_spec property"),
    "none": (None, chunks(0, [0, 1]), "gives rank 1 1 shards, but local_tensor is None"),
    "several": (torch.ones(12, 12), chunks(0, [1, 0, 1]), "gives rank 1 2 shards"),
    "no spec": (torch.ones(12, 12), "rows", "Expecting ShardingSpec but got: str"),  # type: ignore[dict-item]
}  # fmt: skip


@each("what", TENSOR_ERRORS)
def test_one_wrong_tensor_raises_on_all(what: str) -> None:
    tensor, spec, message = TENSOR_ERRORS[what]

    def program(rank: int) -> None:
        if rank == 1:
            init_from_local_tensor(tensor, spec, 24, 12)
        else:
            init_from_local_tensor(torch.ones(12, 12), chunks(0, [0, 1]), 24, 12)

    check_all_raise(2, program, ValueError, message)


# -- with metadata that all ranks have ---------------------------------------------------------


def metadata_of(rank: int, **properties: Any) -> ShardedTensorMetadata:
    parts = [quarter(r).metadata for r in range(4)]
    return ShardedTensorMetadata(parts, (10, 10), TensorProperties(**properties))  # type: ignore[arg-type]


def test_known_metadata() -> None:
    def program(rank: int) -> None:
        mine = quarter(rank)
        made = with_metadata([mine], metadata_of(rank))
        assert made.local_shards() == [mine]
        assert made.metadata() == metadata_of(rank)
        assert made.sharding_spec() == grid([5, 5], [5, 5], range(4))
        assert made.full_tensor()[9, 0] == 2

    on(4, program)


def test_ranks_outside_the_group_make_it_too() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        parts = chunks(0, [1, 2]).build_metadata([4], TensorProperties())
        mine = [shard(rank, [2 * (rank - 1)], [2])] if rank else []
        made = with_metadata(mine, parts, process_group=group)
        assert (made.shape, len(made.local_shards())) == ((4,), bool(rank))

    on(3, program)


def test_shards_come_in_the_order_of_the_metadata() -> None:
    def program(rank: int) -> None:
        parts = chunks(0, [0, 0, 0, 0]).build_metadata([2], TensorProperties())
        given = [Shard(torch.full(tuple(s.shard_sizes), float(s.shard_offsets[0])), s)
                 for s in reversed(parts.shards_metadata)]  # fmt: skip
        made = with_metadata(given, parts)
        assert [s.metadata for s in made.local_shards()] == list(parts.shards_metadata)
        assert made.full_tensor().tolist() == [0.0, 1.0]

    on(1, program)


@each(
    ("bring", "properties", "message"),
    [
        (lambda r: [], {}, r"Number of local shards \(0\) does not match number of local shards"),
        (lambda r: [quarter(r)] * 2, {}, r"Number of local shards \(2\) does not match"),
        (lambda r: [quarter(3 - r)], {}, r"given shards at .* gives rank \d a shard at"),
        (lambda r: [quarter(r, dtype=torch.int8)], {}, "dtype property is incompatible"),
        (lambda r: [quarter(r)], {"requires_grad": True}, "requires_grad property is incompatible"),
        (lambda r: [Shard(torch.ones(5, 5).t(), quarter(r).metadata)], {}, "Only torch.contiguous"),
        (lambda r: [quarter(r)], {"layout": torch.sparse_coo}, "Only torch.strided layout is cur"),
    ],
)
def test_shards_that_the_metadata_does_not_mean(bring: Any, properties: Any, message: str) -> None:
    check_all_raise(
        4, lambda r: with_metadata(bring(r), metadata_of(r, **properties)), ValueError, message
    )


@each("made_by", [ShardedTensor, ShardedTensorBase])
@each(
    ("count", "message"),
    [(0, "must not be empty"), (1, "does not match tensor volume"), (2, "overlap")],
)
def test_metadata_that_do_not_fit_themselves(
    made_by: type[ShardedTensorBase], count: int, message: str
) -> None:
    half = ShardMetadata([0], [2], "rank:0/cpu")
    whole = ShardedTensorMetadata([half] * count, (4,))  # type: ignore[arg-type]
    given = [Shard(torch.ones(2), half)] * count
    make = made_by.from_local_shards_and_global_metadata
    check_all_raise(1, lambda _: make(given, whole), ValueError, message)


@pytest.mark.parametrize("made_by", [ShardedTensor, ShardedTensorBase])
def test_a_spec_may_be_given_if_it_cuts_so(made_by: type[ShardedTensorBase]) -> None:
    parts = chunks(0, [0, 0]).build_metadata([4], TensorProperties())
    shards = [Shard(torch.ones(2), part) for part in parts.shards_metadata]
    make = made_by.from_local_shards_and_global_metadata

    def program(rank: int) -> None:
        for spec in (chunks(-1, [0, 0]), boxes(([2], [2], 0), ([0], [2], 0))):
            assert make(shards, parts, sharding_spec=spec).sharding_spec() is spec
        with pytest.raises(ValueError, match="does not cut the tensor as sharded_tensor_metadata"):
            make(shards, parts, sharding_spec=chunks(0, [0]))

    on(1, program)


# -- without any group -------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_a_base_needs_no_group_and_may_have_all_shards_of_any_strides(dim: int) -> None:
    make = ShardedTensorBase.from_local_shards_and_global_metadata
    source, spec = torch.randn(4, 2), chunks(dim, [0, 1])
    parts = spec.build_metadata((4, 2), TensorProperties())
    shards = [Shard(source[s.box.slices], s) for s in parts.shards_metadata]
    made = make(shards, parts)
    assert made.local_shards() == shards
    assert made.metadata() is parts
    assert (made.sharding_spec(), made.tiling.ranks) == (spec, (0, 1))
    assert (made.shape, made.dtype, made.dim()) == ((4, 2), torch.float32, 2)
    assert [tile.stride() for tile in made.local_tiles()] == [(2, 1)] * 2
    foreign = Shard(torch.ones(1, 2), ShardMetadata([3, 0], [1, 2], "rank:0/cpu"))
    with pytest.raises(ValueError, match=r"lists no shard at \[3:4, 0:2\]"):
        make([shards[0], foreign], parts)


@each("shards", [None, [torch.ones(4)], "shards"])
def test_what_is_no_list_of_shards(shards: Any) -> None:
    def program(rank: int) -> None:
        with pytest.raises(TypeError, match="local shards are a list of Shard"):
            ShardedTensor.init_from_local_shards(shards if rank == 0 else [], 4)

    on(2, program)
