"""From a shard's placement to the rank that owns it."""

from __future__ import annotations

import torch

from tilework import rpc
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, resolve
from tilework.sharded.device import RemoteDevice


def parse_and_validate_remote_device(
    group: AnyGroup, remote_device: RemoteDevice | None
) -> tuple[int, torch.device]:
    """The global rank and the device of a placement; a worker's name is looked up.

    Local; not collective. On ranks outside ``group`` its members are not checked.

    Raises:
        ValueError: There is no placement, its rank is not in the group, no worker has that
            name, or it names neither.
        RuntimeError: It names a worker, and :func:`tilework.rpc.init_rpc` was not called.
    """
    if remote_device is None:
        raise ValueError("remote device is None: give the shard a placement such as 'rank:0/cpu'")
    worker, rank = remote_device.worker_name(), remote_device.rank()
    if worker is not None:
        return _rank_of_worker(worker), remote_device.device()
    if rank is None:
        raise ValueError(
            f"remote device {remote_device} does not tell whose it is: "
            f"write 'rank:<rank>/{remote_device}'"
        )
    found = resolve(group)
    if not isinstance(found, NonMember):
        ranks = get_process_group_ranks(found)
        if rank not in ranks:
            raise ValueError(
                f"Global rank {rank} does not exist in input process group: its ranks are {ranks}"
            )
    return rank, remote_device.device()


def _rank_of_worker(name: str) -> int:
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
