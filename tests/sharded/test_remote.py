"""RRefs to the shards of other ranks: who gets which, what is refused, and what is left behind."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    cut,
    errors_of,
    grid,
    numbered,
    of_quarters,
    on,
    quarter,
)
from tests.tables import each
from tilework import rpc, sharded
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    remote,
)
from tilework.testing import run_ranks


def with_rpc(program: Callable[[int], Any]) -> Callable[[int], Any]:
    """``program``, between init_rpc and shutdown."""

    def run(rank: int) -> Any:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size())
        try:
            return program(rank)
        finally:
            dist.barrier()  # others may still ask this rank, also if it raised
            rpc.shutdown(graceful=False)

    return run


def check_remote(tensor: ShardedTensor, rank: int) -> None:
    """This rank sees every other rank's shards, where it has them and as they are."""
    owners: dict[int, list[ShardMetadata]] = {}
    for tile, shard in zip(tensor.tiling.tiles, tensor.metadata().shards_metadata, strict=True):
        owners.setdefault(tile.owners[0], []).append(shard)
    owners.pop(rank, None)
    found = tensor.remote_shards()
    assert list(found) == sorted(owners)
    for owner, rrefs in found.items():
        assert [rref.owner().id for rref in rrefs] == [owner] * len(rrefs)
        shards = [rref.to_here() for rref in rrefs]
        assert [shard.metadata for shard in shards] == owners[owner]
        for found_there in shards:
            assert isinstance(found_there, Shard)
            assert found_there.tensor.shape == tuple(found_there.metadata.shard_sizes)


@each(
    ("spec", "size"),
    [
        (chunks(0, range(4)), (10, 20)),
        (chunks(-1, range(4)), (10, 20)),
        (chunks(0, [2, 3]), (10, 20)),
        (chunks(0, [*range(4), *range(4)]), (16, 20)),
        (chunks(0, range(4)), (2, 20)),
        (grid([5, 5], [5, 5], range(4)), (10, 10)),
        (boxes(([0, 0], [5, 5], 0), ([5, 0], [5, 5], 1)), (10, 5)),
    ],
)
def test_every_rank_sees_the_shards_of_the_others(
    spec: ShardingSpec, size: tuple[int, ...]
) -> None:
    def program(rank: int) -> None:
        whole = numbered(size)
        tensor = cut(whole, spec, rank, init_rrefs=True)
        check_remote(tensor, rank)
        for rrefs in tensor.remote_shards().values():
            for rref in rrefs:
                shard = rref.to_here()
                assert torch.equal(shard.tensor, whole[shard.metadata.box.slices])

    on(4, with_rpc(program))


def test_values_are_there_before_anyone_can_see_them() -> None:
    def program(rank: int) -> None:
        for _ in range(5):
            tensor = sharded.full(chunks(0, [0, 1]), 8, 7, init_rrefs=True)
            ((rref,),) = tensor.remote_shards().values()
            assert rref.to_here().tensor.tolist() == [7] * 4

    on(2, with_rpc(program))


def test_what_they_see_is_what_is_there_now() -> None:
    def program(rank: int) -> None:
        tensor = sharded.zeros(chunks(0, [0, 1]), 4, init_rrefs=True)
        tensor.local_tensor().fill_(rank + 1)
        dist.barrier()
        ((rref,),) = tensor.remote_shards().values()
        assert rref.to_here().tensor.tolist() == [2 - rank] * 2
        dist.barrier()

    on(2, with_rpc(program))


@pytest.mark.parametrize("members", [[1, 2, 3], [2, 3]])
def test_a_group_of_some_ranks_is_seen_by_all(members: list[int]) -> None:
    def program(rank: int) -> None:
        group = dist.new_group(members)
        spec = chunks(0, [2, 3])
        tensor = sharded.ones(spec, 10, 20, process_group=group, init_rrefs=True)
        assert len(tensor.local_shards()) == (rank >= 2)
        check_remote(tensor, rank)

    on(4, with_rpc(program))


def test_worker_names() -> None:
    def program(rank: int) -> None:
        spec = EnumerableShardingSpec(
            [ShardMetadata([r // 2 * 5, r % 2 * 5], [5, 5], f"worker{r}/cpu") for r in range(4)]
        )
        tensor = sharded.ones(spec, 10, 10, init_rrefs=True)
        (mine,) = tensor.local_shards()
        assert str(mine.metadata.placement) == f"worker{rank}/cpu"
        assert mine.metadata.shard_offsets == (rank // 2 * 5, rank % 2 * 5)
        check_remote(tensor, rank)
        assert torch.equal(tensor.full_tensor(), torch.ones(10, 10))
        assert tensor.reshard(ChunkShardingSpec(0, ["worker3", "worker0/cpu"])).shape == (10, 10)
        check_remote(tensor, rank)

    on(4, with_rpc(program))


def test_tensors_of_what_each_rank_brings() -> None:
    def program(rank: int) -> None:
        check_remote(of_quarters(rank, init_rrefs=True), rank)
        spec = chunks(0, [3, 1, 0, 2])
        made = ShardedTensor.init_from_local_tensor(torch.ones(2, 3), spec, 8, 3, init_rrefs=True)
        check_remote(made, rank)
        again = ShardedTensor.from_local_shards_and_global_metadata(
            made.local_shards(), made.metadata(), init_rrefs=True
        )
        check_remote(again, rank)
        assert again.remote_shards() != made.remote_shards()

    on(4, with_rpc(program))


def test_after_a_reshard_they_are_new() -> None:
    def program(rank: int) -> None:
        whole = numbered([6, 2])
        tensor = cut(whole, chunks(0, [0, 1]), rank, init_rrefs=True)
        tensor.reshard(chunks(1, [1, 2]))
        check_remote(tensor, rank)
        for (rref,) in tensor.remote_shards().values():
            shard = rref.to_here()
            assert torch.equal(shard.tensor, whole[shard.metadata.box.slices])

    on(3, with_rpc(program))


def test_what_is_loaded_has_them_if_it_had_them() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([6, 2]), chunks(0, [0, 1]), rank, init_rrefs=True)
        file = io.BytesIO()
        torch.save([tensor, tensor.like(tensor.local_tiles())], file)
        file.seek(0)
        loaded, without = torch.load(file)
        check_remote(loaded, rank)
        with pytest.raises(RuntimeError, match="created with init_rrefs=False"):
            without.remote_shards()

    on(2, with_rpc(program))


def test_between_processes() -> None:
    def program(rank: int) -> None:
        tensor = sharded.ones(chunks(0, [0, 1]), 5, 3, init_rrefs=True)
        check_remote(tensor, rank)
        ((rref,),) = tensor.remote_shards().values()
        assert torch.equal(rref.to_here().tensor, torch.ones(2 + rank, 3))

    run_ranks(2, with_rpc(program), kind="processes")


# -- what is refused ---------------------------------------------------------------------------


def test_rpc_must_be_initialized() -> None:
    makers: list[Callable[[int], Any]] = [
        lambda rank: sharded.empty(chunks(0, [0]), 10, 20, init_rrefs=True),
        lambda rank: sharded.init_from_local_shards([quarter(rank)], [5, 5], init_rrefs=True),
    ]
    for make in makers:
        check_all_raise(1, make, RuntimeError, "RPC Framework needs to be initialized")
    check_all_raise(
        1,
        lambda rank: sharded.empty(ChunkShardingSpec(0, ["worker0/cpu"]), 10, 20),
        RuntimeError,
        "RPC framework needs to be initialized",
    )


def test_unknown_workers() -> None:
    spec = ChunkShardingSpec(0, ["workerfoo/cpu"])
    check_all_raise(
        2,
        with_rpc(lambda rank: sharded.empty(spec, 10, 20, init_rrefs=True)),
        ValueError,
        "Invalid worker name: 'workerfoo'; the workers are worker0, worker1",
    )


def test_none_were_asked_for() -> None:
    def program(rank: int) -> None:
        tensor = sharded.empty(chunks(0, [0, 1]), 10, init_rrefs=True)
        message = "ShardedTensor created with init_rrefs=False"
        for other in (sharded.empty(chunks(0, [0]), 10), tensor.like(tensor.local_tiles())):
            with pytest.raises(RuntimeError, match=message):
                other.remote_shards()

    on(2, with_rpc(program))


def test_ranks_of_rpc_must_be_those_of_the_group() -> None:
    def program(rank: int) -> None:
        other = (rank + 1) % 2
        rpc.init_rpc(f"worker{other}", rank=other, world_size=2)
        try:
            sharded.empty(chunks(0, [1]), 10, 20, init_rrefs=True)
        finally:
            rpc.shutdown(graceful=False)

    check_all_raise(2, program, ValueError, "Default ProcessGroup and RPC ranks must be the same")


def test_only_some_ranks_bring_shards() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([0, 1])
        if rank < 2:
            part = ShardMetadata([rank], [1], f"rank:{rank}/cpu")
            sharded.init_from_local_shards(
                [Shard(torch.ones(1), part)], 2, process_group=group, init_rrefs=True
            )

    errors = errors_of(3, with_rpc(program))
    assert errors[2] is None
    assert all("init_rrefs=True takes all 3 ranks" in str(error) for error in errors[:2])


@each(
    ("spec", "options", "message"),
    [
        (
            chunks(0, [1, 0]),
            {},
            "the tensor=.* on rank 0 does not match with the tensor=.* on rank 1",
        ),
        (chunks(0, [0, 1]), {"dtype": torch.int8}, "does not match with the tensor="),
        (chunks(0, [0, 7]), {}, "Global rank 7 does not exist"),
        (chunks(3, [0, 1]), {}, "Invalid sharding dim"),
    ],
)
def test_ranks_that_disagree_all_raise(spec: ShardingSpec, options: Any, message: str) -> None:
    def program(rank: int) -> None:
        if rank == 1:
            sharded.empty(spec, 4, init_rrefs=True, **options)
        else:
            sharded.empty(chunks(0, [0, 1]), 4, init_rrefs=True)

    check_all_raise(2, with_rpc(program), ValueError, message)


def test_a_fill_that_fails_on_one_rank_raises_on_all() -> None:
    def program(rank: int) -> None:
        sharded.rand(chunks(0, [1]), 4, dtype=torch.int64, init_rrefs=True)  # rank 0 has no shard

    errors = errors_of(2, with_rpc(program))
    assert [isinstance(error, RuntimeError) for error in errors] == [True, True]


# -- what is left behind -----------------------------------------------------------------------


def test_nothing_is_kept_once_the_tensor_is_gone() -> None:
    def program(rank: int) -> list[weakref.ref[Any]]:
        tensor = sharded.empty(chunks(0, [0, 1]), 10, 20, init_rrefs=True)
        plain = sharded.empty(chunks(0, [0, 1]), 10, 20)
        tile = tensor.local_tensor()
        gone: list[weakref.ref[Any]] = [weakref.ref(tensor), weakref.ref(tile), weakref.ref(plain)]
        assert len(remote.pending_tensors().by_number) == 1
        del tensor, tile, plain
        assert gone[0]() is gone[2]() is None
        assert len(remote.pending_tensors().by_number) == 0
        # The shard stays until the other rank has let its reference go too.
        for _ in range(500):
            dist.barrier()
            if dist_all(gone[1]() is None):
                return gone
            gc.collect()
        raise AssertionError("a shard is still held")

    on(2, with_rpc(program))


def dist_all(fact: bool) -> bool:
    """Whether it is so on all ranks."""
    count = torch.tensor([int(fact)])
    dist.all_reduce(count)
    return bool(count == dist.get_world_size())


def test_nothing_is_kept_of_a_tensor_that_could_not_be_made() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="does not match with"):
            sharded.empty(chunks(0, [0, 1]), 4 + rank, init_rrefs=True)
        assert len(remote.pending_tensors().by_number) == 0
        tensor = sharded.ones(chunks(0, [0, 1]), 4, init_rrefs=True)
        check_remote(tensor, rank)

    on(2, with_rpc(program))


def test_many_tensors_at_once() -> None:
    def program(rank: int) -> None:
        tensors = [sharded.full(chunks(0, [0, 1]), 4, i, init_rrefs=True) for i in range(10)]
        for number, tensor in enumerate(tensors):
            ((rref,),) = tensor.remote_shards().values()
            assert rref.to_here().tensor.tolist() == [number] * 2
        dist.barrier()

    on(2, with_rpc(program))
