"""New sharded tensors: what each function fills them with, and the arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import (
    check_all_raise,
    chunks,
    examples,
    grid,
    join,
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
from tilework.sharded.metadata import Items


def whole_of(n: int, make: Callable[[], ShardedTensor]) -> Tensor:
    """The values that a function fills in, of all ranks."""

    def program(rank: int) -> Any:
        made = make()
        return parts_of(made), tuple(made.shape)

    found = on(n, program)
    return join([part for parts, _ in found for part in parts], found[0][1])


@given(hs.data())
@examples(40)
def test_constants_in_any_layout(data: hs.DataObject) -> None:
    """Each rank has the shards that the spec places there, and the metadata of all."""
    size = tuple(data.draw(hs.lists(hs.integers(0, 9), min_size=1, max_size=3)))
    spec = data.draw(specs(size, (0, 1, 2)))
    name = data.draw(hs.sampled_from(["zeros", "ones", "full", "empty"]))

    def program(rank: int) -> Any:
        arguments = (size, 1234) if name == "full" else size
        made = getattr(sharded, name)(spec, *arguments, dtype=torch.int32)
        metadata = spec.build_metadata(size, TensorProperties(torch.int32))
        assert made.metadata() == metadata
        assert (made.shape, made.device) == (size, torch.device("cpu"))
        mine = [part for part in metadata.shards_metadata if part.placement.rank() == rank]  # type: ignore[union-attr]
        assert [shard.metadata for shard in made.local_shards()] == mine
        assert [list(tile.shape) for tile in made.local_tiles()] == [s.shard_sizes for s in mine]
        return parts_of(made)

    found = join([part for parts in on(3, program) for part in parts], size)
    values = {"zeros": 0, "ones": 1, "full": 1234}
    assert name == "empty" or torch.equal(found, torch.full(size, values[name], dtype=torch.int32))


@each("value", [3, 2.5, True, 1j])
def test_full_takes_the_dtype_of_its_value(value: Any) -> None:
    found = whole_of(2, lambda: sharded.full(chunks(0, [0, 1]), [3], value))
    expected = torch.full([3], value)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype


@each(("ours", "plain"), [(sharded.rand, torch.rand), (sharded.randn, torch.randn)])
@each("size", [(8, 2), (64, 64)])
def test_random_numbers_are_those_of_the_ranks_own_generator(
    ours: Any, plain: Any, size: tuple[int, int]
) -> None:
    # Threads share torch's generator, so one rank.
    def program(rank: int) -> None:
        torch.manual_seed(1234)
        expected = plain(*size, dtype=torch.double)
        torch.manual_seed(1234)
        found = ours(chunks(0, [0]), *size, dtype=torch.double).local_tensor()
        assert torch.equal(found, expected)

    on(1, program)


def test_random_numbers_are_in_their_range() -> None:
    spec = chunks(0, range(3))
    uniform = whole_of(3, lambda: sharded.rand(spec, 30, 30))
    assert 0 <= uniform.min() < 0.1
    assert 0.9 < uniform.max() < 1
    normal = whole_of(3, lambda: sharded.randn(spec, 30, 30))
    assert abs(normal.mean()) < 0.2
    assert 0.8 < normal.std() < 1.2


NUMBERS = hs.one_of(hs.integers(-20, 20), hs.floats(-9, 9, allow_nan=False))


@given(
    hs.tuples(NUMBERS, NUMBERS, NUMBERS.filter(lambda step: abs(step) > 0.05)),
    hs.sampled_from([None, torch.float32, torch.float64, torch.int64, torch.int16, torch.bfloat16]),
)
@examples(40)
def test_arange_is_that_of_torch(
    numbers: tuple[float, float, float], dtype: torch.dtype | None
) -> None:
    start, end, step = numbers
    if (end - start) * step < 0:
        start, end = end, start
    try:
        expected = torch.arange(start, end, step, dtype=dtype)
    except (RuntimeError, ValueError):  # an integer step of 0, say
        return
    spec = chunks(0, [0, 1, 0])
    found = whole_of(2, lambda: sharded.arange(spec, start, end, step, dtype=dtype))
    assert found.dtype == expected.dtype
    rounding = torch.finfo(expected.dtype).eps * 8 if expected.is_floating_point() else 0
    scale = max(abs(start), abs(end))  # of which the kernels' vectors round the parts
    assert_close(found, expected, rtol=0, atol=rounding * scale)


def test_arange_with_fewer_arguments() -> None:
    spec = chunks(0, [0, 1])
    assert torch.equal(whole_of(2, lambda: sharded.arange(spec, 5)), torch.arange(5))
    assert torch.equal(whole_of(2, lambda: sharded.arange(spec, 2, 5)), torch.arange(2, 5))
    assert torch.equal(whole_of(2, lambda: sharded.arange(spec, 5.0)), torch.arange(5.0))


@each("name", ["zeros", "ones", "rand", "randn", "full", "empty"])
def test_tensors_like_another(name: str) -> None:
    def program(rank: int) -> None:
        tensor = sharded.rand(chunks(0, [0]), 8, 8, dtype=torch.double)
        value = (8.8,) if name == "full" else ()
        size: Any = ((8, 8),) if value else (8, 8)
        torch.manual_seed(1234)
        expected = getattr(torch, name)(*size, *value, dtype=torch.float32)
        torch.manual_seed(1234)
        made = getattr(torch, f"{name}_like")(tensor, *value, dtype=torch.float32)
        assert made.sharding_spec() == tensor.sharding_spec()
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
        assert name == "empty" or torch.equal(made.local_tensor(), expected)

    on(1, program)


# -- sizes -------------------------------------------------------------------------------------


@each(
    ("size", "expected"),
    [
        ((10, 20), (10, 20)),
        ((10,), (10,)),
        (([10, 20],), (10, 20)),
        (((10, 20),), (10, 20)),
        ((torch.Size([3, 4]),), (3, 4)),
        ((0, 3), (0, 3)),
        ((0,), (0,)),
    ],
)
def test_sizes_are_numbers_or_one_sequence(size: Any, expected: tuple[int, ...]) -> None:
    def program(rank: int) -> None:
        made = sharded.empty(chunks(0, [0, 1]), *size)
        assert made.size() == made.metadata().size == expected
        assert isinstance(made.size(), torch.Size)
        assert sharded.zeros(chunks(0, [0, 1]), *size).size() == expected

    on(2, program)


@each("size", [("foo",), (2.0,), ([2, "x"],), ([2], [3]), (None,), ({2: 3},)])
def test_other_sizes_are_refused(size: Any) -> None:
    check_all_raise(
        2,
        lambda _: sharded.empty(chunks(0, [0, 1]), *size),
        TypeError,
        "size must be a sequence of ints",
    )


def test_negative_sizes_are_refused() -> None:
    check_all_raise(
        1, lambda _: sharded.empty(chunks(0, [0]), 3, -1), ValueError, "sizes must be 0 or more"
    )


# -- where the shards are ----------------------------------------------------------------------


def test_a_group_of_some_ranks_which_the_others_make_too() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([1, 2, 3])
        made = sharded.ones(chunks(0, [2, 3]), 10, 20, process_group=group)
        assert len(made.local_shards()) == (rank >= 2)
        assert made.process_group is group
        assert (made.shape, made.tiling.ranks) == ((10, 20), (2, 3))
        return made.metadata()

    found = on(4, program)
    assert all(metadata == found[0] for metadata in found)


def test_placements_must_be_in_the_group() -> None:
    message = "Global rank 5 does not exist in input process group"
    check_all_raise(2, lambda _: sharded.empty(chunks(0, [5]), 10), ValueError, message)


# -- properties --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [chunks(0, range(4)), grid([5, 5], [5, 5], range(4))])
def test_properties(spec: ShardingSpec) -> None:
    def program(rank: int) -> None:
        made = sharded.empty(spec, 10, 10)
        assert (made.dtype, made.layout, made.requires_grad) == (
            torch.float32,
            torch.strided,
            False,
        )
        assert made.is_contiguous()
        assert not made.is_pinned()
        assert made.device == torch.device("cpu")
        assert sharded.empty(spec, 10, 10, dtype=torch.double).dtype == torch.double
        assert sharded.empty(spec, 10, 10, pin_memory=True).is_pinned()
        learned = sharded.ones(spec, 10, 10, requires_grad=True)
        assert learned.requires_grad
        assert all(tile.requires_grad and tile.is_leaf for tile in learned.local_tiles())
        assert learned.metadata().tensor_properties.requires_grad

    on(4, program)


def test_the_default_dtype_is_torchs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert on(1, lambda _: sharded.zeros(chunks(0, [0]), 2).dtype) == [torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_layouts_and_formats_are_refused() -> None:
    spec = chunks(0, [0])
    check_all_raise(
        1,
        lambda _: sharded.empty(spec, 10, 20, layout=torch.sparse_coo),
        ValueError,
        "Only torch.strided layout is currently supported",
    )
    check_all_raise(
        1,
        lambda _: sharded.empty(spec, 10, 20, memory_format=torch.channels_last),
        ValueError,
        "Only torch.contiguous_format memory_format is currently supported",
    )


def test_a_spec_is_needed() -> None:
    rows: Any = "rows"
    message = "Expecting ShardingSpec but got: str"
    check_all_raise(1, lambda _: sharded.empty(rows, 10), ValueError, message)


@dataclass(frozen=True)
class Rows(ShardingSpec):
    """A user's own: so many rows for each rank, one after the other."""

    counts: tuple[int, ...]

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        width = tensor_sizes[1]
        starts = [sum(self.counts[:rank]) for rank in range(len(self.counts))]
        parts = [
            ShardMetadata([start, 0], [count, width], f"rank:{rank}/cpu")
            for rank, (start, count) in enumerate(zip(starts, self.counts, strict=True))
        ]
        return ShardedTensorMetadata(Items(parts), torch.Size(tensor_sizes), tensor_properties)


def test_a_users_own_spec() -> None:
    spec = Rows((1, 0, 4))
    assert torch.equal(whole_of(3, lambda: sharded.ones(spec, 5, 2)), torch.ones(5, 2))

    def program(rank: int) -> None:
        tensor = sharded.ones(spec, 5, 2)
        assert tensor.to(torch.float64).sharding_spec() is spec
        moved = tensor.to("meta")
        assert moved.sharding_spec().build_metadata((5, 2), TensorProperties()) == moved.metadata()
        assert tensor.reshard(Rows((2, 2, 1))).local_tensor().shape == ([2, 2, 1][rank], 2)
        assert tensor.sharding_spec() == Rows((2, 2, 1))

    on(3, program)


def test_a_users_own_spec_that_is_wrong() -> None:
    for counts, message in (((1, 2), "do not cover the entire tensor"), ((3, 3), "out of bounds")):
        for make in (
            lambda rank, spec=Rows(counts): sharded.ones(spec, 5, 2),
            lambda rank, spec=Rows(counts): sharded.ones(chunks(0, [0, 1]), 5, 2).reshard(spec),
        ):
            check_all_raise(2, make, ValueError, message)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="group"):
        sharded.empty(chunks(0, [0]), 10)


def test_meta_tensors_take_no_memory() -> None:
    def program(rank: int) -> None:
        for make in (sharded.empty, sharded.zeros, sharded.randn):
            made = make(chunks(0, [0, 1], "meta"), 1 << 40, 1 << 10)
            assert made.local_tensor().device == torch.device("meta")
            assert made.local_tensor().shape == (1 << 39, 1 << 10)
            assert made.device == torch.device("meta")
            assert made.is_meta

    on(2, program)


def test_fill_writes_each_new_shard() -> None:
    def number(shard: sharded.Shard) -> None:
        offsets, size = shard.metadata.shard_offsets, shard.tensor.numel()
        shard.tensor.copy_(torch.arange(size) + offsets[0])

    found = whole_of(2, lambda: ShardedTensor(chunks(0, [1, 0, 1]), 7, fill=number))
    assert torch.equal(found, torch.arange(7.0))
