"""A timeline as trace events, the JSON format that ui.perfetto.dev and chrome://tracing open.

Each rank is a process. Tracks: a thread of the program each, with the named spans; a group each,
with the operations, and within them waiting and moving; and, for asynchronous operations, the
group's engine. Below them are the events of torch's profiler, by thread, and the memory as a
counter. Slices of a track nest, so operations that overlap get tracks of their own. An arrow leads
from the rank that came last to each rank that waited for it, and from sends to receives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tilework.inspect.judging import place
from tilework.inspect.reading import RankTrace, TracedOperation, TracedSpan
from tilework.inspect.timeline import JointOperation, Timeline

#: A trace event: a JSON object.
Event = dict[str, Any]


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace-event document of a timeline."""
    tracks = {trace.rank: _Tracks(trace) for trace in timeline.ranks}
    events: list[Event] = []
    for trace in timeline.ranks:
        events += _spans(trace, tracks[trace.rank], of_torch=False)
    met = {id(part): meeting for meeting in timeline.meetings for part in meeting.parts.values()}
    places: dict[int, int] = {}
    for trace in timeline.ranks:
        for op in trace.operations:
            places[id(op)] = tracks[trace.rank].of(op)
            events += _operation(op, places[id(op)], met.get(id(op)))
    events += _arrows(timeline, places)
    for trace in timeline.ranks:
        events += _spans(trace, tracks[trace.rank], of_torch=True)
        events += _moments(trace)
    named = [event for each in tracks.values() for event in each.names()]
    other = {"problems": timeline.problems, "written by": "tilework trace"}
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": other}


class _Tracks:
    """The tracks of a rank: numbers, and their names."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._names: dict[int, str] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        #: By kind of track: when each track is free again.
        self._ends: dict[str, list[int]] = defaultdict(list)
        #: By thread and lane: the ends of the spans around the last span.
        self._open: dict[tuple[int, int], list[int]] = defaultdict(list)

    def thread(self, span: TracedSpan) -> int:
        """The track of a span; spans come in the order of their beginnings.

        Slices of a track nest, and torch's events need not.
        """
        thread = span.thread
        name = "program" if thread == self._trace.own_thread else self._trace.threads.get(thread)
        for lane in itertools.count():
            around = self._open[thread, lane]
            while around and around[-1] <= span.start:
                around.pop()
            if not around or span.end <= around[-1]:
                around.append(span.end)
                return self._number(_in_lane(name or f"thread {thread}", lane), thread)
        raise AssertionError

    def of(self, op: TracedOperation) -> int:
        name = f"{'engine' if op.is_async else 'group'} {op.group.title}"
        if op.number == 0:
            name = f"messages of {op.group.title}"
        ends = self._ends[name]
        lane = next((at for at, end in enumerate(ends) if end <= op.entered), len(ends))
        ends[lane : lane + 1] = [max(op.end, op.entered)]
        return self._number(_in_lane(name, lane), lane)

    def _number(self, name: str, key: int) -> int:
        number = self._numbers.setdefault((name, key), len(self._numbers))
        self._names[number] = name
        return number

    def names(self) -> Iterator[Event]:
        rank = self._trace.rank
        yield _meta("process_name", rank, 0, name=f"rank {rank} ({self._trace.host})")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        for number, name in self._names.items():
            yield _meta("thread_name", rank, number, name=name)
            yield _meta("thread_sort_index", rank, number, sort_index=number)


def _in_lane(name: str, lane: int) -> str:
    return f"{name} ({lane + 1})" if lane else name


def _meta(kind: str, rank: int, track: int, **values: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "ts": 0, "args": values}


def _slice(name: str, kind: str, rank: int, track: int, start: int, end: int, **told: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": track,
        "ts": start / 1000,
        "dur": max(0, end - start) / 1000,
        "args": told,
    }


def _spans(trace: RankTrace, tracks: _Tracks, of_torch: bool) -> Iterator[Event]:
    for span in trace.spans:
        if span.is_of_torch == of_torch:
            told = {} if span.closed else {"note": "the rank ended within this span"}
            kind, track = "torch" if of_torch else "span", tracks.thread(span)
            yield _slice(span.name, kind, trace.rank, track, span.start, span.end, **told)


def _moments(trace: RankTrace) -> Iterator[Event]:
    for moment in trace.steps:
        step = {"ph": "i", "name": "step", "s": "p", "pid": trace.rank, "tid": 0}
        yield step | {"ts": moment / 1000}
    for moment, sizes in trace.memory:
        counter = {"ph": "C", "name": "memory", "pid": trace.rank, "tid": 0}
        yield counter | {"ts": moment / 1000, "args": sizes}


def _operation(op: TracedOperation, track: int, meeting: JointOperation | None) -> Iterator[Event]:
    told = {"what": op.what, "at": place(op.site), "number": op.number, "bytes": op.bytes}
    yield _slice(
        op.name, "operation", op.rank, track, op.entered, op.end, outcome=op.outcome, **told
    )
    if meeting is None or not meeting.complete or op.end <= op.entered:
        return
    entries = [part.entered for part in meeting.parts.values() if part.entered < op.end]
    cut = max(entries, default=op.entered)
    if cut > op.entered:
        last = next(part.rank for part in meeting.parts.values() if part.entered == cut)
        yield _slice(f"wait for rank {last}", "wait", op.rank, track, op.entered, cut)
    yield _slice("move", "move", op.rank, track, cut, op.end)


def _arrows(timeline: Timeline, tracks: dict[int, int]) -> Iterator[Event]:
    error = {trace.rank: trace.clock_error for trace in timeline.ranks}
    clock = {trace.rank: trace.clock for trace in timeline.ranks}
    for number, wait in enumerate(timeline.waits):
        pair = wait.awaited.rank, wait.waiting.rank
        unsure = clock[pair[0]] != clock[pair[1]] and wait.end - wait.start <= max(
            error[rank] for rank in pair
        )
        name = "awaited (shorter than the clocks' error)" if unsure else "awaited"
        ends = (("s", wait.awaited, wait.awaited.entered), ("f", wait.waiting, wait.end))
        for kind, op, moment in ends:
            arrow = {"ph": kind, "id": number, "name": name, "cat": "arrow", "pid": op.rank}
            arrow |= {"tid": tracks[id(op)], "ts": moment / 1000}
            yield arrow | ({"bp": "e"} if kind == "f" else {})
