"""Metadata are values: equal by content, pickled and copied as they are, and checked."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from tests.sharded.ranks_and_specs import quarter
from tests.tables import each
from tilework.sharded import (
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)

DTYPES = [
    kind
    for kind in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    if not str(kind).startswith("torch.bits")
]
LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_bsc]
FORMATS = [
    torch.contiguous_format,
    torch.channels_last,
    torch.channels_last_3d,
    torch.preserve_format,
]


def quarters() -> list[ShardMetadata]:
    return [
        ShardMetadata([rank // 2 * 5, rank % 2 * 5], [5, 5], f"rank:{rank}/cuda:{rank}")
        for rank in range(4)
    ]


def test_every_combination_of_properties_survives_pickle_and_copies() -> None:
    seen = set()
    for values in itertools.product(DTYPES, LAYOUTS, [True, False], FORMATS, [True, False]):
        metadata = ShardedTensorMetadata(quarters(), (10, 10), TensorProperties(*values))  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(metadata)) == metadata
        seen.add(metadata)
    assert len(seen) == len(DTYPES) * len(LAYOUTS) * 2 * len(FORMATS) * 2
    assert copy.deepcopy(metadata) == copy.copy(metadata) == metadata


def test_torch_load_takes_metadata_with_weights_only() -> None:
    metadata = ShardedTensorMetadata(quarters(), (10, 10), TensorProperties(torch.bfloat16))  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save({"it": metadata}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["it"] == metadata


def test_any_difference_makes_metadata_unequal() -> None:
    def made(**changes: object) -> ShardedTensorMetadata:
        shard = ShardMetadata([0, changes.pop("at", 0)], [5, 5], "rank:0/cpu")  # type: ignore[list-item]
        size = changes.pop("size", (5, 5))
        return ShardedTensorMetadata([shard], size, TensorProperties(**changes))  # type: ignore[arg-type]

    changes: list[dict[str, object]] = [
        {}, {"at": 1}, {"size": (5, 6)}, {"dtype": torch.int8}, {"requires_grad": True},
        {"layout": torch.sparse_coo}, {"pin_memory": True}, {"memory_format": torch.channels_last},
    ]  # fmt: skip
    assert len({made(**dict(change)) for change in changes}) == len(changes)


def test_numbers_are_equal_to_lists_tuples_and_sizes() -> None:
    shard = ShardMetadata([5, 0], torch.Size([5, 10]), "rank:1/cpu")
    assert shard.shard_offsets == [5, 0]
    assert shard.shard_offsets == [5, 0]
    assert shard.shard_offsets == (5, 0)
    assert shard.shard_sizes == torch.Size([5, 10])
    assert shard.shard_offsets != [0, 5]
    assert (list(shard.shard_offsets), len(shard.shard_sizes), shard.shard_sizes[1]) == (
        [5, 0],
        2,
        10,
    )


def test_the_placement_is_parsed_once_and_may_be_missing() -> None:
    assert ShardMetadata([10], [0]).placement is None
    assert ShardMetadata([10], [0], "rank:0/cpu").placement == RemoteDevice("rank:0/cpu")
    assert ShardMetadata([10], [0], torch.device("meta")).placement == RemoteDevice("meta")


@each(
    ("offsets", "sizes", "message"),
    [
        ([0], [1, 2], "as many entries as the tensor has dims"),
        ([-1, 0], [1, 2], "shard_offsets should be >= 0"),
        ([0, 0], [1, -2], "shard_sizes should be >= 0"),
    ],
)
def test_impossible_shards_are_refused(offsets: list[int], sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardMetadata(offsets, sizes)


def test_numbers_are_integers() -> None:
    shard = ShardMetadata(torch.tensor([1, 2]), torch.Size([3, 4]))
    assert [type(n) for n in (*shard.shard_offsets, *shard.shard_sizes)] == [int] * 4
    with pytest.raises(TypeError, match="integer"):
        ShardMetadata([0.5], [1])  # type: ignore[list-item]


def test_properties_of_a_tensor_at_hand() -> None:
    tensor = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert TensorProperties.create_from_tensor(tensor) == TensorProperties(
        torch.float64, requires_grad=True
    )


def test_default_dtype_is_that_of_the_time() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert TensorProperties().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert TensorProperties().dtype == torch.float32


def test_metadata_is_frozen() -> None:
    shard = ShardMetadata([0], [1], "rank:0/cpu")
    whole = ShardedTensorMetadata([shard], (1,))  # type: ignore[arg-type]
    for value, name in ((shard, "placement"), (whole, "size"), (whole.tensor_properties, "dtype")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)


# -- shards ------------------------------------------------------------------------------------


def test_a_shard_from_offsets_has_the_same_metadata() -> None:
    shard = quarter(2)
    made = Shard.from_tensor_and_offsets(shard.tensor, [5, 0], rank=2)
    assert made.metadata == shard.metadata
    assert made.tensor is shard.tensor


def test_a_shard_without_placement() -> None:
    assert Shard(torch.zeros(10), ShardMetadata([0], [10])).metadata.placement is None


def test_a_shard_must_have_the_size_of_its_metadata() -> None:
    with pytest.raises(ValueError, match=r"Shard tensor size does not match.*\(5, 5\).*\(6, 5\)"):
        Shard(torch.ones(5, 5), ShardMetadata([0, 0], [6, 5], "rank:0/cpu"))


def test_a_shard_must_be_on_the_device_of_its_placement() -> None:
    with pytest.raises(ValueError, match="Local shard tensor device does not match"):
        Shard(torch.ones(5), ShardMetadata([0], [5], "rank:0/cuda:0"))
    with pytest.raises(ValueError, match="Local shard tensor device does not match"):
        Shard(torch.ones(5, device="meta"), ShardMetadata([0], [5], "rank:0/cpu"))


def test_shards_are_deep_copied_and_pickled_with_their_values() -> None:
    shard = quarter(3)
    for made in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert made.metadata == shard.metadata
        assert torch.equal(made.tensor, shard.tensor)
        assert made.tensor.data_ptr() != shard.tensor.data_ptr()


def test_a_change_in_place_is_told_how_to_have_another_value() -> None:
    shard = ShardMetadata([0], [2], "rank:0/cpu")
    with pytest.raises(FrozenInstanceError, match=r"placement of ShardMeta.*dataclasses\.replace"):
        shard.placement = None  # type: ignore[misc]
    assert replace(shard, placement=None).placement is None
