"""All ranks on one clock: collectives with each rank's part, messages with both ends, who waits."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework.comm.launching import named
from tilework.inspect.clocks import align, move
from tilework.inspect.reading import (
    RankTrace,
    TracedGroup,
    TracedOperation,
    TracedSpan,
    read_folder,
)


@dataclass(frozen=True, slots=True)
class TracedWait:
    """A rank waits in an operation until another rank has entered it."""

    waiting: TracedOperation
    awaited: TracedOperation
    start: int
    end: int


@dataclass(slots=True)
class JointOperation:
    """A collective, or a message, with the part of each rank that took part."""

    group: TracedGroup
    #: The collective's number in the group; 0 for a message.
    number: int
    parts: dict[int, TracedOperation]
    waits: list[TracedWait] = field(default_factory=list)

    @property
    def last_entry(self) -> int:
        return max(part.entered for part in self.parts.values())

    @property
    def complete(self) -> bool:
        return not self.number or len(self.parts) == len(self.group.ranks)


@dataclass
class Timeline:
    """The events of all ranks, on one clock that begins with the first event."""

    ranks: list[RankTrace]
    meetings: list[JointOperation]
    #: In nanoseconds.
    length: int
    problems: list[str]

    @property
    def read(self) -> int:
        """The nanoseconds of the length whose events were read."""
        return self.length // max((trace.every for trace in self.ranks), default=1)

    @property
    def waits(self) -> Iterator[TracedWait]:
        return (wait for meeting in self.meetings for wait in meeting.waits)


def read_timeline(folder: str | os.PathLike[str]) -> Timeline:
    """The timeline of the traces in a folder.

    Raises:
        TraceError: There is no trace, or there are traces of several jobs.
    """
    return timeline_of(read_folder(folder))


def timeline_of(ranks: list[RankTrace]) -> Timeline:
    """The timeline of ranks' traces, whose times are moved to one clock, in place."""
    problems = [problem for trace in ranks for problem in trace.problems]
    for trace in ranks:
        move(trace, trace.began)
    operations = [op for trace in ranks for op in trace.operations]
    meetings = [*_collectives(operations), *_messages(operations)]
    problems += align(ranks, (meeting.parts for meeting in meetings if meeting.complete))
    known = {trace.rank for trace in ranks}
    asked = {rank for trace in ranks for group in trace.groups.values() for rank in group.ranks}
    if asked - known:
        problems.append(f"there is no trace of {named(asked - known)}")
    for meeting in meetings:
        if meeting.complete:
            meeting.waits = list(_waits(meeting))
    meetings.sort(key=lambda meeting: meeting.last_entry)
    length = max((trace.last for trace in ranks), default=0)
    return Timeline(ranks, meetings, length, problems)


def _collectives(operations: Sequence[TracedOperation]) -> list[JointOperation]:
    found: dict[tuple[TracedGroup, int], JointOperation] = {}
    for op in operations:
        if op.number:
            key = op.group, op.number
            found.setdefault(key, JointOperation(*key, {})).parts[op.rank] = op
    return list(found.values())


def _messages(operations: Sequence[TracedOperation]) -> Iterator[JointOperation]:
    """Sends beside the receives of the same ranks and tag, in the order of calls."""
    sends: dict[tuple[TracedGroup, int, int | None, int], deque[TracedOperation]] = defaultdict(
        deque
    )
    for op in operations:
        if not op.number and op.name == "send":
            sends[op.group, op.rank, op.peer, op.tag].append(op)
    for op in operations:
        if not op.number and op.name == "recv" and op.peer is not None:
            queue = sends.get((op.group, op.peer, op.rank, op.tag))
            if queue:
                send = queue.popleft()
                yield JointOperation(op.group, 0, {send.rank: send, op.rank: op})


def _waits(meeting: JointOperation) -> Iterator[TracedWait]:
    """Each rank waits for the rank that entered last before the rank's own part was over.

    (Not always for the last rank of all: a broadcast does not wait for every rank.)
    """
    entries = sorted(meeting.parts.values(), key=lambda part: part.entered)
    for part in entries:
        if not meeting.number and part.name == "send":
            continue
        start, end = part.blocked
        before = [other for other in entries if other.entered < end and other is not part]
        if before and before[-1].entered > start:
            yield TracedWait(part, before[-1], start, before[-1].entered)


def innermost(spans: Sequence[TracedSpan], start: int, end: int, thread: int) -> str:
    """The name of the shortest span of a thread that covers most of a time; "" if there is none."""
    covering = [
        span
        for span in spans
        if span.thread == thread and 2 * (min(span.end, end) - max(span.start, start)) > end - start
    ]
    return min(covering, key=lambda span: span.end - span.start).name if covering else ""
