"""What moving bytes is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CostModel:
    """What messages cost, and which ranks share a host. It chooses and predicts, nothing else.

    The defaults are what shared memory takes on a small machine (``benchmarks/``), and a network of
    10 Gbit/s.

    Args:
        latency: Seconds of a message or collective, however short, within a host.
        seconds_per_byte: What each byte of it adds.
        network_latency: The same two, between hosts.
        network_seconds_per_byte: Likewise.
        hosts: The host of each rank, by any name; ranks that are not in it share one.

    Raises:
        ValueError: A cost is negative.

    Example:
        >>> cost = CostModel(network_latency=1e-4, hosts={0: "a", 1: "a", 2: "b"})
        >>> cost.seconds(0, 1, 0), cost.seconds(0, 2, 0)
        (2e-06, 0.0001)
    """

    latency: float = 2e-6
    seconds_per_byte: float = 2e-10
    network_latency: float = 8e-5
    network_seconds_per_byte: float = 8e-10
    hosts: Mapping[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        within, between = (
            (self.latency, self.seconds_per_byte),
            (self.network_latency, self.network_seconds_per_byte),
        )
        if min(*within, *between) < 0:
            raise ValueError(f"costs are not negative, got {self}")

    def near(self, src: int, dst: int) -> bool:
        """Whether both ranks are on one host."""
        return not self.hosts or self.hosts.get(src) == self.hosts.get(dst)

    def seconds(self, src: int, dst: int, nbytes: int) -> float:
        """Of one message of ``nbytes`` from ``src`` to ``dst``."""
        if self.near(src, dst):
            return self.latency + nbytes * self.seconds_per_byte
        return self.network_latency + nbytes * self.network_seconds_per_byte

    def parts(self, nbytes: int, most: int) -> int:
        """In how many parts, at most ``most``, as many ranks best send a message of ``nbytes``."""
        if not self.latency:
            return most
        return max(1, min(most, math.isqrt(int(nbytes * self.seconds_per_byte / self.latency))))
