"""Ranks that the others wait for, and how much slower they are, from the times of operations.

A rank's *own time* is that between its collectives: from the end of one to the beginning of the
next. It is what the rank itself takes; the time within a collective is mostly spent waiting for the
slowest. Each is measured on one rank, so clocks need not agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tilework.comm.flight.ring import Entry

#: A rank is a straggler if it takes so many times as long as the others' median, and
RATIO: Final = 1.2
#: so many seconds more for each operation.
LEAST_SECONDS: Final = 0.0005
#: Fewer operations tell little.
LEAST_OPERATIONS: Final = 5


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    #: Seconds of its own between two collectives, on average.
    seconds: float
    #: The median of those of the other ranks.
    others: float
    #: The number of collectives that this comes from.
    operations: int

    @property
    def ratio(self) -> float:
        """The times as long as the others that it takes."""
        return self.seconds / max(self.others, 1e-9)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is {self.ratio:.1f} times as slow as the others: between two "
            f"collectives it takes {_text(self.seconds)} of its own, they {_text(self.others)} "
            f"(over {self.operations} collectives)"
        )


def own_times(entries: Sequence[Entry]) -> dict[int, float]:
    """A rank's own seconds before each collective, by its number; without the first."""
    calls = {entry.number: entry for entry in entries if entry.number}
    times = {}
    for number, entry in calls.items():
        before = calls.get(number - 1)
        if before is not None and before.ended is not None:
            # Asynchronous ones may overlap.
            times[number] = max(0.0, entry.entered - before.ended)
    return times


def stragglers(times: Mapping[int, Mapping[int, float]]) -> list[Straggler]:
    """The stragglers among the ranks, the slowest first.

    Args:
        times: :func:`own_times` of each rank.

    Example:
        >>> own = {0: 0.01, 1: 0.03, 2: 0.01}
        >>> times = {rank: dict.fromkeys(range(2, 12), own[rank]) for rank in own}
        >>> [(one.rank, round(one.ratio, 1)) for one in stragglers(times)]
        [(1, 3.0)]
    """
    if len(times) < 2:
        return []
    common = set.intersection(*(set(own) for own in times.values()))
    if len(common) < LEAST_OPERATIONS:
        return []
    means = {rank: sum(own[n] for n in common) / len(common) for rank, own in times.items()}
    found = []
    for rank, mean in means.items():
        others = statistics.median(other for r, other in means.items() if r != rank)
        if mean >= RATIO * others and mean - others >= LEAST_SECONDS:
            found.append(Straggler(rank, mean, others, len(common)))
    return sorted(found, key=lambda one: -one.ratio)


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
