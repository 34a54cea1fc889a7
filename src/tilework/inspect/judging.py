"""Judging a timeline: who is waited for, at which line, how much; how fast collectives are."""

from __future__ import annotations

import os
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.filesize import decimal

from tilework.comm.per_call.internal import (
    LEAST_OPERATIONS,
    LEAST_SECONDS,
    RATIO,
    Entry,
    Straggler,
    own_times,
    slowest,
    stragglers,
    without,
)
from tilework.inspect.reading import RankTrace, TracedGroup, TracedOperation
from tilework.inspect.timeline import JointOperation, Timeline, innermost

#: A rank is late at a line only if it is later than the others' median in this part of the calls,
_MOSTLY: Final = 0.75
#: and if that makes this part of the trace.
_LEAST_SHARE: Final = 0.02
#: A call of each step is judged apart from others of the line if there are so many steps; and as
#: there are many calls, chance is kept out by asking for more.
_LEAST_STEPS: Final = 10
_PLACE_MOSTLY: Final = 0.8
_PLACE_RATIO: Final = 2.0
#: The most sentences of a kind.
_MOST_TOLD: Final = 5


@dataclass(frozen=True)
class Late:
    """A rank that the others wait for at a line of the program."""

    rank: int
    #: The group, and the operation that the rank enters late: the name, and ``file:line in f``.
    group: str
    operation: str
    site: str
    #: Where the rank's own time begins: the operation before.
    after: str
    #: The span that the rank's own time is in; "" if there is none.
    span: str
    #: The rank's own time before the operation, and the median of the others', in seconds.
    seconds: float
    others: float
    #: The number of operations, and the rank's extra seconds in all of them.
    operations: int
    extra: float
    #: The part of the traced time that all other ranks of the group wait for the rank.
    share: float
    #: If the rank is late in some calls of the line alone: which of the line's equal calls in each
    #: step, counted from 1, and how many there are.
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Speed:
    """The speed of a collective, by group, operation and size."""

    group: str
    operation: str
    bytes: int
    site: str
    operations: int
    #: From the last rank's entry to the end, in all, in seconds.
    moving: float
    #: Bytes a second of a rank while data moves.
    rate: float
    #: The most that the machine's calibration has measured; None if it is not known.
    limit: float | None
    #: The part of the time from call to end in which the ranks did not wait.
    hidden: float


@dataclass(frozen=True)
class Summary:
    """The judgement of a trace. Prints as sentences.

    Attributes:
        seconds: The length of the trace.
        waiting: By rank: the seconds in which the rank waits for other ranks.
        waited_for: By rank: the seconds in which all others of a group wait for the rank.
        late: The ranks that are late, each at a line, the most costly first; empty if work is even.
        stragglers: The ranks that ``find_stragglers`` would name, from the same own times.
        speeds: The collectives with data, those that take the most time first.
        problems: What is missing in the trace, and why.
    """

    seconds: float
    waiting: dict[int, float]
    waited_for: dict[int, float]
    late: tuple[Late, ...]
    stragglers: tuple[Straggler, ...]
    speeds: tuple[Speed, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        late = [_late_text(each, self.seconds) for each in self.late[:_MOST_TOLD]]
        return [
            *(late or [self._even_text()]),
            *map(_speed_text, self.speeds[:_MOST_TOLD]),
            *(f"note: {problem}" for problem in self.problems),
        ]

    def json(self) -> dict[str, Any]:
        """The summary for a program: what JSON can hold."""
        return {"version": 1, **asdict(self)}

    def _even_text(self) -> str:
        if not self.waiting:
            return f"{_time(self.seconds)} traced; no collective was seen"
        shares = {rank: each / max(self.seconds, 1e-9) for rank, each in self.waiting.items()}
        part, most = sum(shares.values()) / len(shares), max(shares, key=shares.__getitem__)
        return (
            f"at no line is a rank late in most calls; ranks wait {part:.0%} of "
            f"{_time(self.seconds)}, at most rank {most}: {shares[most]:.0%}"
        )


def _late_text(late: Late, seconds: float) -> str:
    inside = f", in {late.span!r}" if late.span else ""
    after = f" (after {late.after})" if late.after else ""
    if late.place is not None:
        after += f", call {late.place[0]} of {late.place[1]} in each step"
    return (
        f"rank {late.rank} is waited for {late.share:.0%} of {_time(seconds)}: before "
        f"{late.operation} at {place(late.site) or 'an unknown place'}{after}{inside}; own time "
        f"{_time(late.seconds)}, others {_time(late.others)}, {late.operations} times"
    )


def _speed_text(speed: Speed) -> str:
    of = f" of {speed.limit / 1e9:.1f}" if speed.limit else ""
    return (
        f"{speed.group} {speed.operation} {decimal(speed.bytes)}: {speed.rate / 1e9:.2g}{of} GB/s, "
        f"{speed.operations} times; hidden behind computing: {speed.hidden:.0%}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def summarize(timeline: Timeline) -> Summary:
    """The judgement of a timeline."""
    seconds = timeline.read / 1e9
    waiting = {trace.rank: 0.0 for trace in timeline.ranks if trace.operations}
    for wait in timeline.waits:
        waiting[wait.waiting.rank] += (wait.end - wait.start) / 1e9
    waited_for: dict[int, float] = dict.fromkeys(waiting, 0.0)
    for meeting in timeline.meetings:
        for rank, nanoseconds in waited_for_in(meeting):
            waited_for[rank] += nanoseconds / 1e9
    judge = _Judge(timeline)
    late = sorted(judge.late(), key=lambda each: -each.extra)
    return Summary(
        seconds,
        waiting,
        waited_for,
        tuple(late),
        tuple(judge.stragglers()),
        tuple(_speeds(timeline)),
        tuple(timeline.problems),
    )


def waited_for_in(meeting: JointOperation) -> Iterator[tuple[int, int]]:
    """The rank that all others of a meeting wait for, and how long they all do; if there is one."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for wait in meeting.waits:
        by_rank[wait.awaited.rank].append(wait.end - wait.start)
    for rank, times in by_rank.items():
        if len(times) == len(meeting.parts) - 1:
            yield rank, min(times)


class _Judge:
    """Finds late ranks from their own times, as :mod:`tilework.comm.flight.stragglers` has them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._traces = {trace.rank: trace for trace in timeline.ranks}
        self._calls: dict[TracedGroup, dict[int, dict[int, TracedOperation]]] = defaultdict(dict)
        for trace in timeline.ranks:
            for op in trace.operations:
                if op.number:
                    self._calls[op.group].setdefault(op.rank, {})[op.number] = op
        entries = {
            trace.rank: [(op.group, _entry(op)) for op in trace.operations]
            for trace in timeline.ranks
        }
        self._own = {
            group: {rank: _own_times(group, entries[rank]) for rank in calls}
            for group, calls in self._calls.items()
        }
        self._waited_for = {
            (meeting.group, meeting.number): dict(waited_for_in(meeting))
            for meeting in timeline.meetings
            if meeting.number
        }

    def stragglers(self) -> list[Straggler]:
        """As ``find_stragglers``, over the whole trace."""
        whole = (own for group, own in self._own.items() if len(own) == len(group.ranks))
        return slowest(each for own in whole for each in stragglers(own))

    def late(self) -> Iterator[Late]:
        for group, own in self._own.items():
            if len(own) < 2 or len(own) < len(group.ranks):
                continue
            common = set.intersection(*map(set, own.values()))
            for rank in own:
                for numbers in self._by_line(group, rank, common):
                    found = self._late_at(group, rank, numbers)
                    yield from [found] if found is not None else self._late_in(group, rank, numbers)

    def _by_line(self, group: TracedGroup, rank: int, common: set[int]) -> Iterator[list[int]]:
        calls = self._calls[group][rank]
        by_line: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for number in sorted(common):
            op = calls[number]
            by_line[calls[number - 1].site, op.site, op.name].append(number)
        yield from by_line.values()

    def _late_in(self, group: TracedGroup, rank: int, numbers: Sequence[int]) -> Iterator[Late]:
        """The ranks that are late in some calls of a line: in the same call of each step."""
        calls, steps = self._calls[group][rank], self._traces[rank].steps
        by_place: dict[tuple[str, int], list[int]] = defaultdict(list)
        in_step: Counter[tuple[int, str]] = Counter()
        for number in numbers:
            call = calls[number]
            step = bisect_left(steps, call.entered), call.what
            in_step[step] += 1
            by_place[call.what, in_step[step]].append(number)
        for (what, place), at_place in by_place.items() if steps else ():
            if len(at_place) < _LEAST_STEPS:
                continue
            found = self._late_at(group, rank, at_place, _PLACE_MOSTLY)
            if found is not None and found.seconds >= _PLACE_RATIO * found.others:
                most = max(count for (_, of), count in in_step.items() if of == what)
                yield replace(found, place=(place, most))

    def _late_at(
        self, group: TracedGroup, rank: int, numbers: Sequence[int], mostly: float = _MOSTLY
    ) -> Late | None:
        own = self._own[group]
        mine = [own[rank][number] for number in numbers]
        others = [
            statistics.median(own[other][number] for other in own if other != rank)
            for number in numbers
        ]
        extra = [a - b for a, b in zip(mine, others, strict=True)]
        if not self._is_late(mine, others, extra, mostly):
            return None
        calls = self._calls[group][rank]
        op, before = calls[numbers[0]], calls[numbers[0] - 1]
        waited = sum(self._waited_for.get((group, n), {}).get(rank, 0) for n in numbers)
        return Late(
            rank,
            group.title,
            op.name,
            op.site,
            f"{before.name} at {place(before.site)}" if before.site else "",
            self._span(self._traces[rank], calls, numbers),
            statistics.median(mine),
            statistics.median(others),
            len(numbers),
            sum(extra),
            waited / max(self._timeline.read, 1),
        )

    def _is_late(
        self, mine: Sequence[float], others: Sequence[float], extra: Sequence[float], mostly: float
    ) -> bool:
        if len(mine) < LEAST_OPERATIONS:
            # Seldom: only what costs much of the whole time tells anything.
            return sum(extra) >= max(0.2 * self._timeline.read / 1e9, 0.25)
        longer = sum(each > 0 for each in extra)
        return (
            statistics.median(extra) >= LEAST_SECONDS
            and statistics.median(mine) >= RATIO * statistics.median(others)
            and longer >= mostly * len(extra)
            and sum(extra) >= _LEAST_SHARE * self._timeline.read / 1e9
        )

    def _span(
        self, trace: RankTrace, calls: Mapping[int, TracedOperation], numbers: Sequence[int]
    ) -> str:
        found: dict[str, int] = defaultdict(int)
        for number in numbers[:8]:
            start, end = calls[number - 1].end, calls[number].entered
            found[innermost(trace.spans, start, end, trace.own_thread)] += 1
        return max(found, key=lambda name: found[name])


def _entry(op: TracedOperation) -> Entry:
    ended = op.ended / 1e9 if op.ended else None
    return Entry(op.number, op.what, op.site, op.entered / 1e9, ended, op.outcome, op.peer, op.tag)


def _own_times(
    group: TracedGroup, entries: Sequence[tuple[TracedGroup, Entry]]
) -> dict[int, float]:
    mine = [entry for of, entry in entries if of == group]
    return own_times(mine, without((entry for _, entry in entries), mine))


def _speeds(timeline: Timeline) -> list[Speed]:
    limits = timeline.ranks[0].limits
    kinds: dict[tuple[TracedGroup, str, int, str], list[JointOperation]] = defaultdict(list)
    for meeting in timeline.meetings:
        part = next(iter(meeting.parts.values()))
        if meeting.number and part.bytes and meeting.complete:
            kinds[meeting.group, part.name, part.bytes, part.site].append(meeting)
    speeds = []
    for (group, name, size, site), meetings in kinds.items():
        parts = [part for meeting in meetings for part in meeting.parts.values()]
        moving = [
            max(0, max(part.end for part in m.parts.values()) - m.last_entry) for m in meetings
        ]
        under_way = sum(part.end - part.entered for part in parts)
        blocked = sum(end - start for start, end in (part.blocked for part in parts))
        speeds.append(
            Speed(
                group.title,
                name,
                size,
                site,
                len(meetings),
                sum(moving) / 1e9,
                size / max(statistics.median(moving) / 1e9, 1e-9),
                limits.get(name),
                max(0.0, 1 - blocked / under_way) if under_way else 0.0,
            )
        )
    return sorted(speeds, key=lambda each: -each.moving)


def place(site: str) -> str:
    """A call site for a person: the file, from the working folder if it is below, and the line."""
    path = site.partition(" in ")[0]
    below = os.path.join(os.getcwd(), "")
    return path.removeprefix(below)
