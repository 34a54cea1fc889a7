"""RRefs to the shards of other ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework import rpc
from tilework.comm.operations.internal import agree
from tilework.comm.world import AnyGroup, current_world, get_rank, get_world_size
from tilework.sharded.metadata import Shard


@dataclass(eq=False)
class RemoteShards:
    """The RRefs of the tensor of this number on this rank, by the rank that owns the shards."""

    number: int
    rrefs: dict[int, list[rpc.RRef[Shard]]] = field(default_factory=dict)


@dataclass(eq=False)
class PendingTensors:
    """This rank's tensors that await RRefs from other ranks."""

    #: Numbers for tensors to come, from 0 on. A tensor may have another number on another rank.
    numbers: Iterator[int] = field(default_factory=itertools.count)
    #: By number; dropped with the last other reference to the tensor.
    by_number: weakref.WeakValueDictionary[int, RemoteShards] = field(
        default_factory=weakref.WeakValueDictionary
    )


def pending_tensors() -> PendingTensors:
    """The pending tensors of this rank."""
    return current_world().state(PendingTensors)


def check_ready(group: AnyGroup = None) -> None:
    """Raise if the ranks of ``group`` cannot make RRefs to each other's shards."""
    if not rpc.is_initialized():
        raise RuntimeError(
            "RPC Framework needs to be initialized using tilework.rpc.init_rpc if init_rrefs is "
            "set to True"
        )
    rank, worker = get_rank(), rpc.get_worker_info().id
    world, workers = get_world_size(), len(rpc.get_worker_infos())
    if (rank, world) != (worker, workers):
        raise ValueError(
            f"Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank: {rank} of {world} and RPC rank: {worker} of {workers}"
        )
    if get_world_size(group) != workers:
        raise ValueError(
            f"init_rrefs=True takes all {workers} ranks, but the tensor's group has "
            f"{get_world_size(group)}: leave out init_rrefs, or make the tensor on all ranks"
        )


def rank_of_worker(name: str) -> int:
    """The global rank of the worker of this name; raises if there is none, or no RPC."""
    if not rpc.is_initialized():
        raise RuntimeError(
            f"RPC framework needs to be initialized to place a shard on worker {name!r}: "
            f"call tilework.rpc.init_rpc first, or place it by rank ('rank:<rank>/<device>')"
        )
    infos = rpc.get_worker_infos()
    for info in infos:
        if info.name == name:
            return info.id
    names = ", ".join(info.name for info in infos)
    raise ValueError(f"Invalid worker name: {name!r}; the workers are {names}")


def share(shards: Sequence[Shard]) -> RemoteShards:
    """Exchange RRefs to this rank's shards for all other ranks' RRefs. Collective; blocks."""
    state = pending_tensors()
    shared = RemoteShards(next(state.numbers))
    state.by_number[shared.number] = shared
    numbers = agree(lambda: shared.number)
    agree(lambda: _send(shards, numbers))
    return shared


def _send(shards: Sequence[Shard], numbers: Sequence[int]) -> None:
    """Send RRefs to this rank's shards to every other rank; blocks until they have them."""
    if not shards:
        return
    rrefs, here = [rpc.RRef(shard) for shard in shards], get_rank()
    futures = [
        rpc.rpc_async(rank, _receive, args=(number, rrefs, here))
        for rank, number in enumerate(numbers)
        if rank != here
    ]
    for future in futures:
        future.wait()


def _receive(number: int, rrefs: list[rpc.RRef[Shard]], owner: int) -> None:
    shared = pending_tensors().by_number.get(number)
    if shared is None:
        raise RuntimeError(
            f"rank {owner} sent RRefs for sharded tensor {number}, which rank {get_rank()} does "
            f"not know: every rank must make the tensor"
        )
    shared.rrefs[owner] = rrefs
