"""RRefs to the shards of other ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework import rpc
from tilework.comm.agreement import agree
from tilework.comm.world import AnyGroup, current_world, get_rank, get_world_size
from tilework.sharded.metadata import Shard


@dataclass(eq=False)
class RemoteShards:
    """The RRefs of one sharded tensor, by the rank that owns the shards."""

    number: int
    rrefs: dict[int, list[rpc.RRef[Shard]]] = field(default_factory=dict)


@dataclass(eq=False)
class Expected:
    """This rank's tensors that other ranks may send RRefs for."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    #: They leave as soon as nothing else holds them.
    known: weakref.WeakValueDictionary[int, RemoteShards] = field(
        default_factory=weakref.WeakValueDictionary
    )


def expected() -> Expected:
    """This rank's."""
    return current_world().state(Expected)


def check_ready(everyone: AnyGroup = None) -> None:
    """Whether RRefs can be made by the ranks of ``everyone``.

    Raises:
        RuntimeError: RPC is not initialized.
        ValueError: The ranks of RPC and of the default process group differ, or only some of them
            are in ``everyone``.
    """
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
    if get_world_size(everyone) != workers:
        raise ValueError(
            f"init_rrefs=True takes all {workers} ranks, but the tensor is made by the "
            f"{get_world_size(everyone)} of its group: make it without, or on all ranks"
        )


def rank_of_worker(name: str) -> int:
    """The global rank of the worker of this name.

    Raises:
        RuntimeError: RPC is not initialized.
        ValueError: No worker has the name.
    """
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
    """Exchange RRefs to this rank's shards for those of all others.

    Collective over the default group, whose ranks are the workers; blocks. What fails on one rank
    raises on all.
    """
    state = expected()
    made = RemoteShards(next(state.numbers))
    state.known[made.number] = made
    numbers = agree(lambda: made.number)
    agree(lambda: _send(shards, numbers))
    return made


def _send(shards: Sequence[Shard], numbers: Sequence[int]) -> None:
    """Tell every other rank of this one's shards; blocks until they know."""
    if not shards:
        return
    mine, me = [rpc.RRef(shard) for shard in shards], get_rank()
    futures = [
        rpc.rpc_async(rank, _receive, args=(number, mine, me))
        for rank, number in enumerate(numbers)
        if rank != me
    ]
    for future in futures:
        future.wait()


def _receive(number: int, rrefs: list[rpc.RRef[Shard]], owner: int) -> None:
    """Runs on the rank that is told of another's shards."""
    known = expected().known.get(number)
    if known is None:
        raise RuntimeError(
            f"rank {owner} sent RRefs for sharded tensor {number}, which rank {get_rank()} does "
            f"not know: every rank must make the tensor"
        )
    known.rrefs[owner] = rrefs
