"""RRefs to the shards of other ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilework import rpc
from tilework.comm.world import current_world, get_rank
from tilework.sharded.metadata import Shard

if TYPE_CHECKING:
    from tilework.sharded.base import ShardedTensorBase


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


def check_ready() -> None:
    """Whether RRefs can be made.

    Raises:
        RuntimeError: RPC is not initialized.
        ValueError: The ranks of RPC and of the default process group differ.
    """
    if not rpc.is_initialized():
        raise RuntimeError(
            "RPC Framework needs to be initialized using tilework.rpc.init_rpc if init_rrefs is "
            "set to True"
        )
    rank, worker = get_rank(), rpc.get_worker_info().id
    if rank != worker:
        raise ValueError(
            f"Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank: {rank} and RPC rank: {worker}"
        )


def share(tensor: ShardedTensorBase) -> RemoteShards:
    """Exchange RRefs to the shards of ``tensor``. Collective over all workers; blocks."""
    state = expected()
    made = RemoteShards(next(state.numbers))
    state.known[made.number] = made
    numbers = rpc.all_gather(made.number)
    mine = [rpc.RRef(shard) for shard in tensor.local_shards()]
    me = rpc.get_worker_info()
    if mine:
        futures = [
            rpc.rpc_async(info, _receive, args=(numbers[info.name], mine, me.id))
            for info in rpc.get_worker_infos()
            if info.id != me.id
        ]
        for future in futures:
            future.wait()
    rpc.all_gather(None)  # all have received all
    return made


def _receive(number: int, rrefs: list[rpc.RRef[Shard]], owner: int) -> None:
    """Runs on the rank that is told of another's shards."""
    known = expected().known.get(number)
    if known is None:
        raise RuntimeError(
            f"rank {owner} sent RRefs for sharded tensor {number}, which rank {get_rank()} does "
            f"not know: every rank must make the tensor"
        )
    known.rrefs[owner] = rrefs
