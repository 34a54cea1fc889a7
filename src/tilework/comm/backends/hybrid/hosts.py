"""Find out which ranks of a group share a host, by sharing memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.shm.shm_backend import CannotShareMemoryError, create_shm_group
from tilework.comm.backends.shm.shm_group import ShmGroup
from tilework.store import PrefixStore

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def share_memory(request: DistributedBackendOptions) -> tuple[Hosts, ShmGroup]:
    """The hosts of a group, found by sharing memory, and a shm group of this host's ranks.

    Collective; blocks until all ranks came. Ranks of one kernel, network namespace and user try to
    share memory. If that fails, each of them counts as a separate host.
    """
    store, me, size = request.store, request.group_rank, request.group_size
    everyone = range(size)
    store.set(f"host/{me}", host_identity(request))
    identities = store.multi_get([f"host/{rank}" for rank in everyone])
    candidates = tuple(rank for rank in everyone if identities[rank] == identities[me])
    try:
        group = create_shm_group(part_of(request, candidates, "shared"), None)
    except CannotShareMemoryError:
        candidates = (me,)
        group = create_shm_group(part_of(request, candidates, f"alone_{me}"), None)
    try:
        store.set(f"shares/{me}", " ".join(map(str, candidates)))
        shares = store.multi_get([f"shares/{rank}" for rank in everyone])
        hosts = sorted({tuple(int(rank) for rank in text.split()) for text in shares})
        return Hosts(tuple(hosts), me), group
    except BaseException:  # another rank was lost, say
        group.close()
        raise


def part_of(
    request: DistributedBackendOptions, ranks: Sequence[int], name: str
) -> DistributedBackendOptions:
    """The request for a group of some ``ranks``, which meet under ``name`` in the store."""
    return replace(
        request,
        store=PrefixStore(f"{name}_{ranks[0]}", request.store),
        group_rank=ranks.index(request.group_rank),
        group_size=len(ranks),
        global_ranks_in_group=tuple(request.global_ranks_in_group[rank] for rank in ranks),
    )


def host_identity(request: DistributedBackendOptions | None = None) -> str:
    """A string that is equal on ranks that may be able to share memory, and try to."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    network = _NETWORK.stat().st_ino if _NETWORK.exists() else 0
    return f"{boot}/{network}/{getattr(os, 'geteuid', int)()}"
