"""The cost model: the expected time to move bytes. All choices by price use it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.layout.placements import Partial, Placement, Replicate, Shard


class AxisChange(NamedTuple):
    """The change that a redistribution makes along one axis of a mesh."""

    length: int
    source: Placement
    target: Placement


@dataclass(frozen=True)
class CostModel:
    """The cost of messages, and which ranks share a host. It only serves choices and predictions.

    The defaults are measurements of shared memory on a small machine (``benchmarks/``), and a
    network of 10 Gbit/s.

    Args:
        latency: Seconds of a message or collective, however short, within a host.
        seconds_per_byte: Seconds that each byte adds.
        hosts: The host of each rank, by any name; ranks that are not listed share a host.

    Raises:
        ValueError: A cost is negative.
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
            raise ValueError(f"costs must not be negative, got {self}")

    def near(self, src: int, dst: int) -> bool:
        """True if both ranks are on one host."""
        return not self.hosts or self.hosts.get(src) == self.hosts.get(dst)

    def seconds(self, src: int, dst: int, nbytes: int) -> float:
        """The price of one message of ``nbytes`` from ``src`` to ``dst``."""
        return self.collective_seconds(nbytes, 1, not self.near(src, dst))

    def collective_seconds(
        self, nbytes: float, messages: int = 1, between_hosts: bool = False
    ) -> float:
        """The price of a collective.

        Args:
            nbytes: The bytes sent or received by the busiest rank, the larger of both.
            messages: The number of messages whose latency counts.
            between_hosts: True if some of the ranks are on different hosts.
        """
        if between_hosts:
            return messages * self.network_latency + nbytes * self.network_seconds_per_byte
        return messages * self.latency + nbytes * self.seconds_per_byte

    def parts(self, nbytes: int, most: int) -> int:
        """The best number of parts (at most ``most``) of ``nbytes``, each sent by another rank."""
        if not self.latency:
            return most
        return max(1, min(most, math.isqrt(int(nbytes * self.seconds_per_byte / self.latency))))

    # -- estimates for choosing among layouts ----------------------------------------------------

    @property
    def latency_bytes(self) -> float:
        """The bytes that could be moved during the latency of a message, within a host."""
        return self.latency / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def redistribution_bytes(self, nbytes: float, changes: Iterable[AxisChange]) -> float:
        """The estimated price of a redistribution, in bytes that a rank moves, latencies included.

        Bytes serve instead of seconds: prices in integers add up exactly, and equal ways have equal
        prices. Along one axis it is the price of the steps from
        :func:`~tilework.layout.redistribution_steps`, if shards are even. Along several axes it
        adds up the prices of single axes, though steps may do several axes at once: it does not
        search, as it is computed for every candidate in a comparison.

        Args:
            nbytes: The bytes of a rank's local tensor before.
        """
        price = 0.0
        # In the cheapest order: first the changes that make local tensors smaller.
        for length, source, target in sorted(changes, key=_by_size_afterwards):
            share = (length - 1) / length
            match source, target:
                case Replicate(), Shard():
                    nbytes /= length
                case Partial(), Shard():
                    price += self.latency_bytes + share * nbytes
                    nbytes /= length
                case Shard(), Shard():
                    price += self.latency_bytes + share * nbytes
                case Partial(), _:
                    price += self.latency_bytes + 2 * share * nbytes
                case Shard(), _:
                    nbytes *= length
                    price += self.latency_bytes + share * nbytes
        return price

    def reduction_bytes(self, nbytes: float, length: int) -> float:
        """The minimum of bytes to reduce local tensors of ``nbytes`` along an axis."""
        return (length - 1) / length * nbytes


def _by_size_afterwards(change: AxisChange) -> int:
    if isinstance(change.target, Shard):
        return 0 if isinstance(change.source, Replicate) else 1
    return 2 if isinstance(change.source, Partial) else 3


DEFAULT_COST = CostModel()
