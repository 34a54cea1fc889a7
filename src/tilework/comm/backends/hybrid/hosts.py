"""The hosts of a group: which ranks share a host, and which carry data between hosts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.shm.shm_backend import CannotShareMemoryError, create_shm_group
from tilework.store import PrefixStore

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Hosts:
    """The group ranks of each host, as one rank sees them.

    A *lane* is a set of ranks, one of each host, that carry a share of the data between hosts.
    There are as many lanes as ranks on the smallest host.

    Attributes:
        ranks: For each host, the group ranks there.
        me: This rank's number in the group.

    Example:
        >>> hosts = Hosts(((0, 1, 4), (2, 3)), 3)
        >>> hosts.lanes, hosts.lane, hosts.peer(0)
        (2, 1, 1)
    """

    ranks: tuple[tuple[int, ...], ...]
    me: int

    @cached_property
    def index(self) -> int:
        """The number of this rank's host."""
        return self.host_of(self.me)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.ranks[self.index]

    @cached_property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.local.index(self.me)

    @cached_property
    def lanes(self) -> int:
        """The number of ranks of each host that exchange with other hosts."""
        return min(len(ranks) for ranks in self.ranks)

    @property
    def lane(self) -> int | None:
        """The number of this rank's lane; None if this rank carries no data between hosts."""
        return self.local_rank if self.local_rank < self.lanes else None

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The numbers of the other hosts, in cyclic order from the host after this host. Each host
        thus serves a different host first.
        """
        count = len(self.ranks)
        return tuple((self.index + step) % count for step in range(1, count))

    def peer(self, host: int) -> int:
        """The group rank on ``host`` that has the same lane as this rank."""
        return self.ranks[host][self.local_rank]

    def host_of(self, rank: int) -> int:
        """The number of the host that has group rank ``rank``."""
        return next(h for h, ranks in enumerate(self.ranks) if rank in ranks)


def share_memory(request: DistributedBackendOptions) -> tuple[Hosts, NativeGroup]:
    """Find out which ranks share a host, by sharing memory; return the hosts, and a shm group of
    this host's ranks.

    Collective; blocks until all ranks came. Ranks of the same kernel, network namespace and user
    try to share memory. If that fails, each of them counts as a separate host.
    """
    store, me, size = request.store, request.group_rank, request.group_size
    everyone = range(size)
    store.set(f"host/{me}", host_identity(request))
    identities = store.multi_get([f"host/{rank}" for rank in everyone])
    candidates = tuple(rank for rank in everyone if identities[rank] == identities[me])
    try:
        group = create_shm_group(_part(request, candidates, "shared"), None)
    except CannotShareMemoryError:
        candidates = (me,)
        group = create_shm_group(_part(request, candidates, f"alone_{me}"), None)
    try:
        store.set(f"shares/{me}", " ".join(map(str, candidates)))
        shares = store.multi_get([f"shares/{rank}" for rank in everyone])
        hosts = sorted({tuple(int(rank) for rank in text.split()) for text in shares})
        return Hosts(tuple(hosts), me), group
    except BaseException:  # another rank was lost, say
        group.close()
        raise


def _part(
    request: DistributedBackendOptions, ranks: tuple[int, ...], name: str
) -> DistributedBackendOptions:
    return replace(
        request,
        store=PrefixStore(f"{name}_{ranks[0]}", request.store),
        group_rank=ranks.index(request.group_rank),
        group_size=len(ranks),
        global_ranks_in_group=tuple(request.global_ranks_in_group[rank] for rank in ranks),
    )


def host_identity(request: DistributedBackendOptions) -> str:
    """A string that is equal on ranks that may be able to share memory. Only ranks with equal
    strings try to.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"
