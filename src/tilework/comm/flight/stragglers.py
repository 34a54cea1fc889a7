"""Ranks that the others wait for, and the delays, from the times of operations.

A rank's *own time* is the time between two collectives: from the end of one to the beginning of the
next. In that time the rank works; within a collective it mostly waits for the slowest rank. Each
own time is measured on one rank, so clocks need not agree. Waits in another group's collective, or
for a message, are subtracted: there the rank may wait for another rank.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tilework.comm.flight.ring import Entry

#: A rank is a straggler if the rank's own time is this many times the others' median, and
RATIO: Final = 1.2
#: this many seconds longer for each operation.
LEAST_SECONDS: Final = 0.0005
#: Fewer operations show little.
LEAST_OPERATIONS: Final = 5


@dataclass(frozen=True, repr=False)
class Straggler:
    """A rank that the others wait for. Prints as a sentence, in lists too."""

    #: The global rank.
    rank: int
    #: The rank's own time between two collectives, in seconds, on average.
    seconds: float
    #: The median of the other ranks' averages.
    others: float
    #: The number of collectives in the average.
    operations: int
    #: The longest own time before a collective, in seconds.
    longest: float = 0.0

    @property
    def ratio(self) -> float:
        """The rank's own time, divided by the median of the other ranks' own times."""
        return self.seconds / max(self.others, 1e-9)

    @property
    def cost(self) -> float:
        """The rank's extra seconds, over all collectives."""
        return (self.seconds - self.others) * self.operations

    def __repr__(self) -> str:
        times = (
            f"between two collectives it takes {_text(self.seconds)} of its own, they "
            f"{_text(self.others)} (over {self.operations} collectives)"
        )
        if self.longest - self.others > self.cost / 2:
            return (
                f"rank {self.rank} was late once, by {_text(self.longest - self.others)}: {times}"
            )
        return f"rank {self.rank} is {self.ratio:.1f} times as slow as the others: {times}"


def own_times(entries: Sequence[Entry], others: Sequence[Entry] = ()) -> dict[int, float]:
    """The rank's own time in seconds before each collective of a group but the first, by number."""
    calls = {entry.number: entry for entry in entries if entry.number}
    waits = _Waits(entries, others)
    times = {}
    for number, entry in calls.items():
        before = calls.get(number - 1)
        if before is not None and before.ended is not None:
            # Asynchronous operations may overlap.
            own = entry.entered - before.ended
            times[number] = max(0.0, own - waits.seconds(before.ended, entry.entered))
    return times


def without(entries: Iterable[Entry], own: Iterable[Entry]) -> list[Entry]:
    """``entries`` without those in ``own``; entries are compared by identity."""
    known = {id(entry) for entry in own}
    return [entry for entry in entries if id(entry) not in known]


def blocking(entries: Iterable[Entry], all_entries: Iterable[Entry]) -> list[Entry]:
    """The ended operations in which a rank did nothing else (entered no other), in order."""
    begun = sorted(entry.entered for entry in all_entries)
    return [
        entry
        for entry in sorted(entries, key=lambda entry: entry.entered)
        if entry.ended is not None and not _any_between(begun, entry.entered, entry.ended)
    ]


class _Waits:
    """A rank's blocking time in messages, and in collectives of other groups."""

    def __init__(self, entries: Sequence[Entry], others: Sequence[Entry]) -> None:
        candidates = [*others, *(entry for entry in entries if not entry.number)]
        found = blocking(candidates, (*entries, *others)) if candidates else []
        self._spans = [(entry.entered, entry.ended or 0.0) for entry in found]
        self._starts = [start for start, _ in self._spans]

    def seconds(self, start: float, end: float) -> float:
        """The seconds in these operations between the times ``start`` and ``end``."""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        spans = self._spans[first:last]
        return sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)


def _any_between(moments: Sequence[float], start: float, end: float) -> bool:
    """True if one of sorted moments is after ``start`` and before ``end``."""
    return bisect_left(moments, end) > bisect_right(moments, start)


def stragglers(times: Mapping[int, Mapping[int, float]]) -> list[Straggler]:
    """The stragglers among the ranks, by the :func:`own_times` of each; the slowest first."""
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
            longest = max(times[rank][number] for number in common)
            found.append(Straggler(rank, mean, others, len(common), longest))
    return sorted(found, key=lambda one: -one.ratio)


def slowest(found: Iterable[Straggler]) -> list[Straggler]:
    """The stragglers of several groups, each rank once with the highest cost; slowest first."""
    worst: dict[int, Straggler] = {}
    for one in found:
        before = worst.get(one.rank)
        if before is None or one.cost > before.cost:
            worst[one.rank] = one
    return sorted(worst.values(), key=lambda one: -one.ratio)


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
