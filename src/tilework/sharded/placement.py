"""Owners of shards: the rank and device that a placement names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, resolve
from tilework.sharded.device import RemoteDevice
from tilework.sharded.metadata import ShardMetadata

#: The global rank that owns a shard, and the device as that rank sees it.
Place = tuple[int, torch.device]


def parse_and_validate_remote_device(
    group: AnyGroup, remote_device: RemoteDevice | None
) -> tuple[int, torch.device]:
    """The global rank and the device of a placement; a worker's name is looked up.

    Local; not collective.

    Raises:
        ValueError: There is no placement, the rank is not in the group, no worker has the name, or
            the placement has neither a rank nor a name.
        RuntimeError: It names a worker, and :func:`tilework.rpc.init_rpc` was not called.

    Example:
        >>> from tilework.testing import run_ranks
        >>> last = RemoteDevice("rank:1/cpu")
        >>> run_ranks(2, lambda rank: parse_and_validate_remote_device(None, last))[0]
        (1, device(type='cpu'))
    """
    return _place(remote_device, _ranks_of(group))


def places(group: AnyGroup, shards: Iterable[ShardMetadata]) -> list[Place]:
    """The owner and device of each shard, as from :func:`parse_and_validate_remote_device`."""
    ranks = _ranks_of(group)
    return [_place(shard.placement, ranks) for shard in shards]


def _ranks_of(group: AnyGroup) -> Collection[int] | None:
    """The group's ranks; None where this rank cannot know them."""
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        return resolved.global_ranks or None
    ranks = get_process_group_ranks(resolved)
    consecutive = range(len(ranks))
    return consecutive if ranks == list(consecutive) else ranks


def _place(place: RemoteDevice | None, ranks: Collection[int] | None) -> Place:
    if place is None:
        raise ValueError("remote device is None: give the shard a placement such as 'rank:0/cpu'")
    worker, rank = place.worker_name(), place.rank()
    if worker is not None:
        rank = _rank_of_worker(worker)
    if rank is None:
        raise ValueError(
            f"remote device {place} does not tell whose it is: write 'rank:<rank>/{place}'"
        )
    if ranks is not None and rank not in ranks:
        raise ValueError(
            f"Global rank {rank} does not exist in input process group: its ranks are {list(ranks)}"
        )
    return rank, place.device()


def _rank_of_worker(name: str) -> int:
    from tilework.sharded import remote

    return remote.rank_of_worker(name)


def check_rrefs(init_rrefs: bool, group: AnyGroup = None) -> None:
    """Raise if RRefs to shards are asked for, and the ranks of ``group`` cannot make them."""
    if init_rrefs:
        from tilework.sharded import remote

        remote.check_ready(group)
