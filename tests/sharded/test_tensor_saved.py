"""Saving, loading, pickling and copying."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import boxes, check_all_raise, chunks, cut, grid, numbered, on
from tests.tables import each
from tilework import sharded
from tilework.sharded import (
    ShardedTensor,
    ShardedTensorBase,
    ShardingSpec,
    TensorProperties,
    load_with_process_group,
)
from tilework.testing import run_ranks

SPECS = [
    chunks(0, [0, 1]),
    chunks(1, [1, 0, 1, 1, 0]),
    chunks(0, [1]),
    grid([1, 3], [2, 1], [0, 1]),
    boxes(([0, 0], [4, 2], 1), ([0, 2], [4, 1], 0)),
]


def saved(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


def check_same(made: ShardedTensor, tensor: ShardedTensor) -> None:
    assert type(made) is ShardedTensor
    assert made is not tensor
    assert made.metadata() == tensor.metadata()
    assert made.sharding_spec() == tensor.sharding_spec()
    assert (made.shape, made.dtype, made.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert made.requires_grad is tensor.requires_grad
    for mine, theirs in zip(made.local_shards(), tensor.local_shards(), strict=True):
        assert mine.metadata == theirs.metadata
        assert torch.equal(mine.tensor, theirs.tensor)
        assert mine.tensor.requires_grad is theirs.tensor.requires_grad
        assert not mine.tensor.numel() or mine.tensor.data_ptr() != theirs.tensor.data_ptr()


@each("spec", SPECS)
@each("weights_only", [True, False])
def test_save_and_load(spec: ShardingSpec, weights_only: bool) -> None:
    def program(rank: int) -> None:
        for gradient in (False, True):
            tensor = cut(numbered([4, 3]), spec, rank, requires_grad=gradient)
            made = torch.load(saved({"it": [tensor]}), weights_only=weights_only)["it"][0]
            check_same(made, tensor)
            assert made.process_group is tensor.process_group
            assert torch.equal(made.full_tensor(), numbered([4, 3]))

    on(2, program)


@each("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([5]).to(dtype), chunks(0, [0, 1]), rank)
        check_same(torch.load(saved(tensor)), tensor)

    on(2, program)


@each("spec", SPECS)
def test_pickle_and_copies(spec: ShardingSpec) -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4, 3]), spec, rank, requires_grad=True)
        check_same(pickle.loads(pickle.dumps(tensor)), tensor)
        check_same(copy.deepcopy(tensor), tensor)
        shallow = copy.copy(tensor)
        assert shallow is not tensor
        for mine, theirs in zip(shallow.local_tiles(), tensor.local_tiles(), strict=True):
            assert mine is theirs

    on(2, program)


def test_what_is_shared_stays_shared_in_a_deep_copy() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), chunks(0, [0, 1]), rank)
        tensors, tile, again = copy.deepcopy(([tensor, tensor], tensor.local_tensor(), tensor))
        assert tensors[0] is tensors[1] is again
        assert again.local_tensor() is tile

    on(2, program)


def test_modules_with_sharded_parameters() -> None:
    def program(rank: int) -> None:
        module: Any = torch.nn.Module()
        module.weight = torch.nn.Parameter(cut(numbered([4]), chunks(0, [0, 1]), rank))
        for tile in module.weight.local_tiles():
            tile.grad = torch.ones_like(tile)
        for made in (copy.deepcopy(module), torch.load(saved(module), weights_only=False)):
            parameter: Any
            (parameter,) = made.parameters()
            assert isinstance(parameter, torch.nn.Parameter)
            assert isinstance(parameter, ShardedTensor)
            check_same(parameter, module.weight)
            made.weight = parameter  # torch.nn would refuse what is no Parameter
        (parameter,) = copy.deepcopy(module).parameters()
        assert parameter.local_tensor().grad.tolist() == [1, 1]
        assert isinstance(copy.copy(module.weight), torch.nn.Parameter)

    on(2, program)


def test_bases_are_copied_and_pickled_without_a_group() -> None:
    parts = chunks(0, [0, 1]).build_metadata((4,), TensorProperties())
    shards = [sharded.Shard(torch.ones(2), part) for part in parts.shards_metadata]
    base = ShardedTensorBase.from_local_shards_and_global_metadata(shards, parts)
    for made in (copy.deepcopy(base), pickle.loads(pickle.dumps(base)), torch.load(saved(base))):
        assert type(made) is ShardedTensorBase
        assert made.metadata() == parts
        assert [tile.tolist() for tile in made.local_tiles()] == [[1, 1], [1, 1]]


def test_other_processes_load_what_was_saved(tmp_path: Any) -> None:
    def save(rank: int) -> None:
        torch.save(cut(numbered([5, 2]), chunks(0, [1, 0]), rank), tmp_path / f"{rank}.pt")

    def load(rank: int) -> None:
        tensor = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(tensor.full_tensor(), numbered([5, 2]))

    run_ranks(2, save, kind="processes")
    run_ranks(2, load, kind="processes")


def test_map_location() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), chunks(0, [0, 1]), rank)
        made = torch.load(saved(tensor), map_location="meta")
        assert made.metadata() == sharded.empty(chunks(0, [0, 1], "meta"), 4).metadata()
        assert made.sharding_spec() == chunks(0, [0, 1], "meta")
        assert made.local_tensor().is_meta

    on(2, program)


# -- onto other groups -------------------------------------------------------------------------


def test_onto_another_group_of_the_same_ranks() -> None:
    def program(rank: int) -> None:
        first, second = dist.new_group([0, 2]), dist.new_group([0, 2])
        tensor = cut(numbered([4]), chunks(0, [0, 2]), rank, process_group=first)
        file = saved(tensor)
        with load_with_process_group(second) as group:
            made = torch.load(file)
        assert group is second
        assert made.process_group is second
        check_same(made, tensor)
        if rank != 1:
            assert made.full_tensor().tolist() == [0, 1, 2, 3]

    on(3, program)


def test_ranks_outside_the_group_compare_what_they_know() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([2, 3])
        tensor = cut(numbered([4]), chunks(0, [2, 3]), rank, process_group=group)
        with load_with_process_group(group):
            made = torch.load(saved(tensor))
        assert torch.equal(tensor, made)

    on(4, program)


def test_a_group_of_other_ranks() -> None:
    def program(rank: int) -> None:
        file = saved(cut(numbered([4]), chunks(0, range(4)), rank))
        group = dist.new_group([0, 2, 3])
        message = (
            "Local world size at save time was 4" if rank == 0 else "Local rank at save time was"
        )
        with load_with_process_group(group), pytest.raises(RuntimeError, match=message):
            torch.load(file)
        file.seek(0)
        assert torch.load(file).process_group is dist.get_default_group()

    on(4, program)


def test_another_world(tmp_path: Any) -> None:
    def save(rank: int) -> None:
        torch.save(cut(numbered([4]), chunks(0, [0, 1]), rank), tmp_path / f"{rank}.pt")

    on(2, save)
    check_all_raise(
        3,
        lambda rank: torch.load(tmp_path / f"{min(rank, 1)}.pt"),
        RuntimeError,
        "(Local world size|Local rank) at save time was",
    )
    check_all_raise(
        2,
        lambda rank: torch.load(tmp_path / f"{1 - rank}.pt"),
        RuntimeError,
        "Local rank at save time was",
    )


def test_the_same_place_in_a_group_of_another_world(tmp_path: Any) -> None:
    def save(rank: int) -> None:
        group = dist.new_group([1, 2])
        tensor = cut(numbered([4]), chunks(0, [1, 2]), rank, process_group=group)
        if rank:
            torch.save(tensor, tmp_path / f"{rank}.pt")

    def load(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank not in (1, 2):
            return
        message = "Global world size at save time was 3, but at load time was 4"
        with load_with_process_group(group), pytest.raises(RuntimeError, match=message):
            torch.load(tmp_path / f"{rank}.pt")

    on(3, save)
    on(4, load)


def test_without_any_group() -> None:
    (data,) = on(1, lambda rank: saved(cut(numbered([4]), chunks(0, [0]), rank)).getvalue())
    with pytest.raises(RuntimeError, match="Need to initialize default process group"):
        torch.load(io.BytesIO(data))


def test_one_at_a_time() -> None:
    def program(rank: int) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        with (
            load_with_process_group(first),
            pytest.raises(RuntimeError, match="already"),
            load_with_process_group(second),
        ):
            pytest.fail("entered")
        with pytest.raises(KeyError), load_with_process_group(first):
            raise KeyError
        with load_with_process_group(second):  # an error has left nothing behind
            pass
        made = torch.load(saved(sharded.ones(chunks(0, [0, 1]), 4)))
        assert made.process_group is dist.get_default_group()

    on(2, program)


def test_each_rank_has_its_own_group_to_load_onto() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([rank], use_local_synchronization=True)
        tensor = sharded.ones(chunks(0, [rank]), 4, process_group=group)
        with load_with_process_group(group):
            dist.barrier()
            assert torch.load(saved(tensor)).process_group is group
            dist.barrier()

    on(3, program)


def test_ranks_without_shards_know_where_the_others_went() -> None:
    def program(rank: int) -> None:
        saved = io.BytesIO()
        torch.save(sharded.ones(chunks(0, [1]), 4), saved)
        saved.seek(0)
        loaded = torch.load(saved, map_location="meta")
        assert {str(s.placement) for s in loaded.metadata().shards_metadata} == {"rank:1/meta"}
        assert loaded.full_tensor().is_meta

    run_ranks(2, program)
