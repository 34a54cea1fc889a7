"""What moving bytes is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CostModel:
    """What a message costs; used to choose and to print, never to decide what is right.

    Args:
        latency: Seconds that any message or collective takes within a host.
        host_latency: The same, between hosts.
        seconds_per_byte: Of moving a byte from rank to rank within a host.
        host_seconds_per_byte: The same, between hosts.
        hosts: The host of each rank, by any name; ranks that are not in it share one host.
    """

    latency: float = 2e-6
    host_latency: float = 5e-5
    seconds_per_byte: float = 1e-10
    host_seconds_per_byte: float = 1e-9
    hosts: Mapping[int, object] = field(default_factory=dict)

    def host(self, rank: int) -> object:
        """The host of a rank; None where unknown."""
        return self.hosts.get(rank)

    def seconds(self, src: int, dst: int, nbytes: int) -> float:
        """Of one message of ``nbytes`` from ``src`` to ``dst``."""
        if self.host(src) == self.host(dst):
            return self.latency + nbytes * self.seconds_per_byte
        return self.host_latency + nbytes * self.host_seconds_per_byte
