"""The clocks of hosts, made a single clock.

The monotonic clock is the same for all processes of a host. The clock of another host is found from
what the ranks did together: nobody ends a barrier or a reduction, nor receives a message, before
the others have entered it. Each such operation bounds the difference of two clocks from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilework.comm.launching import named
from tilework.inspect.reading import RankTrace, TracedOperation

#: The parts of ranks in an operation, by rank.
Parts = Mapping[int, TracedOperation]
#: After these every rank has heard of every other.
_MEETS_ALL = ("barrier", "all_reduce")


@dataclass(frozen=True)
class ClockDifference:
    """The nanoseconds to add to a host's clock, and the largest error; inf: unknown."""

    add: int
    error: float


def difference(ours: RankTrace, theirs: RankTrace, bounds: tuple[float, float]) -> ClockDifference:
    """The difference of two clocks, by what the ranks did together; else by the wall clocks."""
    low, high = bounds
    if math.isinf(low) or math.isinf(high):
        add = (theirs.wall - theirs.began) - (ours.wall - ours.began)
        return ClockDifference(add, math.inf)
    return ClockDifference(round((low + high) / 2), abs(high - low) / 2)


def bounds_of(ours: set[int], theirs: set[int], joint: Iterable[Parts]) -> tuple[float, float]:
    """The least and the largest number to add to the clock of the ranks ``theirs``, from operations
    with all parts, each on the clock of the rank's host.
    """
    low, high = -math.inf, math.inf
    for parts in joint:
        before, after = _heard(parts)
        if ours & after.keys() and theirs & before.keys():
            high = min(high, _ends(after, ours) - _entries(before, theirs))
        if theirs & after.keys() and ours & before.keys():
            low = max(low, _entries(before, ours) - _ends(after, theirs))
    return low, high


def _heard(parts: Parts) -> tuple[Parts, Parts]:
    """The parts that begin before the end of the others, and these others."""
    sends = {rank: part for rank, part in parts.items() if part.name == "send"}
    over = {rank: part for rank, part in parts.items() if part.outcome == "done" and part.ended}
    if sends:
        return sends, {rank: part for rank, part in over.items() if rank not in sends}
    meets = all(part.name in _MEETS_ALL for part in parts.values())
    meets = meets and all(part.bytes or part.name == "barrier" for part in parts.values())
    return (parts, over) if meets else ({}, {})


def _entries(parts: Parts, ranks: set[int]) -> int:
    return max(part.entered for rank, part in parts.items() if rank in ranks)


def _ends(parts: Parts, ranks: set[int]) -> int:
    return min(part.end for rank, part in parts.items() if rank in ranks)


def align(ranks: list[RankTrace], joint: Iterable[Parts]) -> list[str]:
    """Move all times to the clock of the first rank's host, from the first event on, in place.

    Returns sentences about clocks of other hosts.
    """
    joint, told = list(joint), []
    by_clock: dict[str, list[RankTrace]] = {}
    for trace in ranks:
        by_clock.setdefault(trace.clock, []).append(trace)
    (first, *_), *others = by_clock.values()
    ours = {trace.rank for trace in by_clock[first.clock]}
    for traces in others:
        theirs = {trace.rank for trace in traces}
        found = difference(first, traces[0], bounds_of(ours, theirs, joint))
        for trace in traces:
            move(trace, found.add)
            trace.clock_error = found.error
        told.append(_told(theirs, found))
    origin = min(min(_moments(trace), default=trace.last) for trace in ranks)
    for trace in ranks:
        move(trace, -origin)
    return told


def _told(theirs: set[int], found: ClockDifference) -> str:
    if math.isinf(found.error):
        return (
            f"{named(theirs)} ran on another host, placed by the hosts' wall clocks: the error is "
            f"not known, and waits between hosts are not exact"
        )
    return (
        f"{named(theirs)} ran on another host, whose clock is known to {found.error / 1e6:.3g} ms, "
        f"from operations of both"
    )


def _moments(trace: RankTrace) -> list[int]:
    begun = [op.entered for op in trace.operations[:1]] + [span.start for span in trace.spans[:1]]
    return begun + [moment for moment, _ in trace.memory[:1]]


def move(trace: RankTrace, by: int) -> None:
    """Add ``by`` to all times of a trace, in place."""
    for op in trace.operations:
        op.entered += by
        for name in ("waited", "finished", "ended"):
            moment = getattr(op, name)
            setattr(op, name, moment and moment + by)
    trace.steps = [moment + by for moment in trace.steps]
    trace.memory = [(moment + by, sizes) for moment, sizes in trace.memory]
    for span in trace.spans:
        span.start, span.end = span.start + by, span.end + by
    trace.last += by
