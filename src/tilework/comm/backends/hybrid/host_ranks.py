"""The hosts of a group, as ranks see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The group ranks of each host, as one rank sees them.

    A *lane* is a set of ranks, one of each host, that carry a share of the data between hosts.
    There are as many lanes as ranks on the smallest host.
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
        """The numbers of the other hosts, in cyclic order: each host serves another first."""
        count = len(self.ranks)
        return tuple((self.index + step) % count for step in range(1, count))

    def peer(self, host: int) -> int:
        """The group rank on ``host`` that has the same lane as this rank."""
        return self.ranks[host][self.local_rank]

    def host_of(self, rank: int) -> int:
        """The number of the host that has group rank ``rank``."""
        return next(h for h, ranks in enumerate(self.ranks) if rank in ranks)
