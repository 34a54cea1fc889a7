"""Reading a folder of ranks' traces: bounded, and as far as a cut file goes. Trusts nothing."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from tilework.comm.launching import named, printable
from tilework.comm.per_call.internal import RUNNING
from tilework.inspect.format import CAPTURED, MARK, MOST_READ_BYTES, VERSION, TraceError

_NAME: Final = re.compile(r"rank-(\d{1,6})(\.\d+)?\.jsonl")
_MOST_LINE_BYTES: Final = 1 << 20
#: The stretches that are read of a trace that is too large.
_STRETCHES: Final = 16
#: By kind of line, the position of the time.
_TIME_AT: Final = {b"o": 8, b"b": 2, b"e": 2, b"p": 2, b"m": 1, b"x": 1, b"z": 1}
#: No number in a file is larger: some 292 years in nanoseconds.
_LARGEST: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class TracedGroup:
    """A group of ranks; equal in the traces of all members."""

    name: str
    backend: str
    description: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        return printable(self.description or self.name)


@dataclass(slots=True)
class TracedOperation:
    """An operation of one rank. Times are nanoseconds of the job's clock; 0: not known."""

    rank: int
    group: TracedGroup
    #: Counts the group's collectives from 1; 0 for a message.
    number: int
    what: str
    site: str
    peer: int | None
    tag: int
    entered: int
    #: Of an asynchronous operation: when a thread first had to wait for it; when it was done.
    waited: int
    finished: int
    #: When the caller noticed the end.
    ended: int
    outcome: str
    bytes: int

    @property
    def name(self) -> str:
        return self.what.partition(" ")[0]

    @property
    def is_async(self) -> bool:
        """True if the call returned before the operation was done."""
        return bool(self.waited or (self.finished and self.outcome != RUNNING))

    @property
    def end(self) -> int:
        """When the operation was over; the end of the trace if it still ran."""
        return self.finished or self.ended or self.entered

    @property
    def blocked(self) -> tuple[int, int]:
        """From when to when the rank waited in the operation; 0 and 0 if that is not known."""
        if self.waited:
            return self.waited, max(self.waited, self.end)
        unknown = self.is_async or self.outcome == RUNNING
        return (0, 0) if unknown else (self.entered, self.end)


@dataclass(slots=True)
class TracedSpan:
    """A named part of a rank's program."""

    rank: int
    thread: int
    name: str
    start: int
    end: int
    #: False if the rank ended within it.
    closed: bool = True

    @property
    def is_of_torch(self) -> bool:
        return self.thread < 0


@dataclass
class RankTrace:
    """The trace of one rank."""

    rank: int
    host: str
    pid: int
    job: str
    clock: str
    #: What the times count from: on the monotonic clock, and since 1970.
    began: int
    wall: int
    own_thread: int
    limits: dict[str, float]
    operations: list[TracedOperation] = field(default_factory=list)
    spans: list[TracedSpan] = field(default_factory=list)
    #: When steps of the program were over.
    steps: list[int] = field(default_factory=list)
    #: The bytes by use, at times.
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    groups: dict[int, TracedGroup] = field(default_factory=dict)
    last: int = 0
    #: One part of so many of the time was read.
    every: int = 1
    complete: bool = False
    #: The most nanoseconds by which times are wrong beside those of the first rank's host.
    clock_error: float = 0.0
    problems: list[str] = field(default_factory=list)


def read_folder(
    folder: str | os.PathLike[str], most_bytes: int = MOST_READ_BYTES
) -> list[RankTrace]:
    """The traces in a folder, by rank; refuses folders without traces, or with those of several
    jobs.
    """
    path = Path(folder)
    try:
        names = sorted(name for name in os.listdir(path) if _NAME.fullmatch(name))
    except OSError as error:
        raise TraceError(f"cannot read the folder {str(path)!r}: {error.strerror}") from None
    if not names:
        raise TraceError(
            f"there is no trace in {str(path)!r} (no rank-0.jsonl, …): name the folder given to "
            f"trace() or to tilework run --trace"
        )
    traces, unreadable = [], []
    sample = _sample_of([path / name for name in names], most_bytes)
    for name in names:
        try:
            traces.append(read_file(path / name, most_bytes // len(names), sample))
        except TraceError as error:
            unreadable.append(f"{name} is left out: {error}")
    if not traces:
        raise TraceError(f"no trace in {str(path)!r} can be read: {unreadable[0]}")
    _check_job(path, traces)
    latest = max(trace.wall for trace in traces)
    kept = [trace for trace in traces if trace.wall + trace.last >= latest]
    if len(kept) < len(traces):
        older = named(trace.rank for trace in traces if trace not in kept)
        kept[0].problems.append(f"left out, as the files are of an earlier trace: {older}")
    kept[0].problems += unreadable
    if sample.every > 1:
        kept[0].problems.append(
            f"the files have more than {most_bytes / 1e6:,.0f} MB: {_STRETCHES} stretches are "
            f"read, {1 / sample.every:.1%} of the time, and numbers and shares are theirs"
        )
    return sorted(kept, key=lambda trace: trace.rank)


def _check_job(path: Path, traces: list[RankTrace]) -> None:
    jobs: dict[str, list[int]] = {}
    for trace in traces:
        jobs.setdefault(trace.job, []).append(trace.rank)
    if len(jobs) > 1:
        told = "; ".join(f"{named(ranks)} of job {printable(job)}" for job, ranks in jobs.items())
        raise TraceError(
            f"{str(path)!r} holds traces of {len(jobs)} jobs ({told}): keep each job's files in a "
            f"folder of their own"
        )


class Sample(NamedTuple):
    """The stretches of time that are read, the same on all ranks."""

    #: One part of so many is read; 1: all is read.
    every: int = 1
    #: Nanoseconds since 1970: the beginning, and the time from stretch to stretch.
    begin: int = 0
    period: int = 1

    def has(self, moment: int) -> bool:
        """True if what happened at a time (in nanoseconds since 1970) is read."""
        return (moment - self.begin) % self.period * self.every < self.period

    def of(self, wall: int, lines: list[bytes]) -> list[bytes]:
        """The lines, without operations if they all lie between two stretches."""
        if self.every == 1:
            return lines
        ends = [next(filter(None, map(_moment, some)), 0) for some in (lines, reversed(lines))]
        stretches = {(wall + moment - self.begin) // self.period for moment in ends}
        if len(stretches) > 1 or any(self.has(wall + moment) for moment in ends):
            return lines
        return [line for line in lines if line[2:3] != b"o"]


#: All is read.
_ALL: Final = Sample()


def _sample_of(paths: Sequence[Path], most_bytes: int) -> Sample:
    """The sample that leaves about ``most_bytes`` of the files."""
    size, begin, end = 0, _LARGEST, 0
    for path in paths:
        with suppress(OSError, TraceError), _opened(path) as file:
            wall = _header(file.readline(_MOST_LINE_BYTES)).wall
            size += os.fstat(file.fileno()).st_size
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LINE_BYTES))
            moments = [moment for line in file if (moment := _moment(line)) is not None]
            begin, end = min(begin, wall), max(end, wall + max(moments, default=0))
    every = -(-size // most_bytes)
    return Sample(every, begin, max(1, (end - begin) // _STRETCHES)) if every > 1 else _ALL


def _moment(line: bytes) -> int | None:
    """The time in a line, found without reading the rest; None if it has none."""
    at = _TIME_AT.get(line[2:3])
    with suppress(ValueError, IndexError):
        return None if at is None else int(line.split(b",", at + 1)[at].strip(b" ]\n"))
    return None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read. Raises TraceError for a pipe, which might never end."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TraceError("it is not a regular file")
        yield file


def read_file(path: Path, most_bytes: int = MOST_READ_BYTES, sample: Sample = _ALL) -> RankTrace:
    """The trace of one rank, as far as the file goes; refuses those of other versions."""
    try:
        with _opened(path) as file:
            trace = _header(file.readline(_MOST_LINE_BYTES))
            trace.every = sample.every
            _Reader(trace, sample).read(_bounded(file, trace, most_bytes, sample))
    except OSError as error:
        raise TraceError(f"{path.name} cannot be read: {error.strerror}") from None
    return trace


def _chunks(file: BinaryIO) -> Iterator[list[bytes]]:
    rest = b""
    while data := file.read(_MOST_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        yield lines
    yield [rest] if rest else []


def _bounded(file: BinaryIO, trace: RankTrace, most_bytes: int, sample: Sample) -> Iterator[bytes]:
    """The lines to read: operations in the sample, and all others."""
    size = os.fstat(file.fileno()).st_size
    left = most_bytes - file.tell() if sample.every == 1 else 2 * most_bytes
    for line in (line for lines in _chunks(file) for line in sample.of(trace.wall, lines)):
        moment = _moment(line) if sample.every > 1 else None
        if moment is None or sample.has(trace.wall + moment):
            left -= len(line) + 1
        elif line[2:3] == b"o":
            continue
        if left < 0:
            read = f"{most_bytes / 1e6:,.1f} of {size / 1e6:,.1f} MB"
            trace.problems.append(
                f"of rank {trace.rank} only the first {read} are read: trace a shorter time"
            )
            return
        yield line


def _header(line: bytes) -> RankTrace:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError("it does not begin with the header of a trace") from None
    if not isinstance(header, dict) or MARK not in header:
        raise TraceError("it is not a trace of tilework")
    if header[MARK] != VERSION:
        raise TraceError(
            f"it is of version {header[MARK]!r:.20}, but this tilework reads version {VERSION}: "
            f"read it with the tilework that wrote it"
        )
    try:
        limits = {str(name): float(most) for name, most in header["limits"].items()}
        texts = (printable(str(header[name]))[:200] for name in ("host", "job", "clock"))
        host, job, clock = texts
        numbers = (_whole(header[n]) for n in ("rank", "pid", "began", "wall", "thread"))
        rank, pid, began, wall, thread = numbers
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"the header is not as expected: {type(error).__name__} {error}") from None
    return RankTrace(rank, host, pid, job, clock, began, wall, thread, limits)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _LARGEST:
        raise ValueError(f"a whole number was expected, not {value!r:.40}")
    return value


class _Reader:
    """Reads the lines of a file, after the header, into a trace."""

    def __init__(self, trace: RankTrace, sample: Sample) -> None:
        self._trace, self._sample = trace, sample
        self._texts: dict[int, str] = {}
        self._open: dict[int, list[TracedSpan]] = {}
        self._operations: dict[tuple[int, int], TracedOperation] = {}
        self._read: dict[str, Callable[..., None]] = {
            "t": self._text,
            "g": self._group,
            "o": self._operation,
            "b": self._begin,
            "e": self._end,
            "p": self._profiled,
            "s": self._step,
            "m": self._memory,
            "h": self._thread,
            "l": self._lost,
            "x": self._full,
            "z": self._complete,
        }

    def read(self, lines: Iterator[bytes]) -> None:
        trace = self._trace
        for number, line in enumerate(lines, 2):
            try:
                kind, *fields = json.loads(line)
                self._read[kind](*fields)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                trace.problems.append(
                    f"the file of rank {trace.rank} is cut or damaged in line {number}: what comes "
                    f"before is used"
                )
                break
        trace.operations = sorted(self._operations.values(), key=lambda op: op.entered)
        trace.last = max((trace.last, *(op.end for op in trace.operations)), default=0)
        for op in trace.operations:
            if op.outcome == RUNNING:
                op.finished = max(trace.last, op.entered)
        for spans in self._open.values():
            for span in spans:
                span.end, span.closed = max(trace.last, span.start), False
        captured = (span.end for span in trace.spans if span.name == CAPTURED)
        trace.steps = sorted((*trace.steps, *captured))
        trace.spans.sort(key=lambda span: (span.start, -span.end))
        if not (trace.complete or trace.problems):
            trace.problems.append(
                f"the trace of rank {trace.rank} has no end: the rank still runs, or was killed"
            )

    def _text(self, number: int, text: str) -> None:
        self._texts[_whole(number)] = printable(text).replace("\n", " ")

    def _group(self, number: int, name: str, backend: str, about: str, ranks: list[int]) -> None:
        name, backend, about = map(printable, (name, backend, about))
        members = tuple(map(_whole, ranks))
        self._trace.groups[_whole(number)] = TracedGroup(name, backend, about, members)

    def _operation(
        self, group: int, key: int, number: int, what: int, site: int, *rest: Any
    ) -> None:
        peer, tag, entered, waited, finished, ended, outcome, size = rest
        self._operations[_whole(group), _whole(key)] = TracedOperation(
            self._trace.rank,
            self._trace.groups[group],
            _whole(number),
            self._texts[what],
            self._texts[site],
            None if peer is None else _whole(peer),
            _whole(tag),
            *(_whole(entered), _whole(waited), _whole(finished), _whole(ended)),
            self._texts[outcome],
            _whole(size),
        )

    def _begin(self, thread: int, moment: int, name: int) -> None:
        span = TracedSpan(self._trace.rank, _whole(thread), self._texts[name], _whole(moment), 0)
        self._open.setdefault(thread, []).append(span)
        self._keep(span)
        self._trace.last = max(self._trace.last, moment)

    def _keep(self, span: TracedSpan) -> None:
        if self._sample.has(self._trace.wall + span.start):
            self._trace.spans.append(span)

    def _end(self, thread: int, moment: int) -> None:
        spans = self._open.get(_whole(thread))
        if spans:  # else the span began before the trace
            spans.pop().end = _whole(moment)
        self._trace.last = max(self._trace.last, moment)

    def _profiled(self, thread: int, start: int, end: int, name: int) -> None:
        times = _whole(start), _whole(end)
        self._keep(TracedSpan(self._trace.rank, _whole(thread), self._texts[name], *times))
        self._trace.last = max(self._trace.last, end)

    def _step(self, moment: int) -> None:
        self._trace.steps.append(_whole(moment))

    def _memory(self, moment: int, by_use: dict[str, int]) -> None:
        sizes = {printable(str(use))[:40]: _whole(size) for use, size in by_use.items()}
        if self._sample.has(self._trace.wall + _whole(moment)):
            self._trace.memory.append((moment, sizes))
        self._trace.last = max(self._trace.last, moment)

    def _thread(self, thread: int, name: str) -> None:
        self._trace.threads[_whole(thread)] = printable(name)

    def _lost(self, operations: int, spans: int) -> None:
        lost = f"{_whole(operations):,} operations and {_whole(spans):,} spans"
        text = f"rank {self._trace.rank} was too fast: {lost} are missing"
        self._trace.problems = [p for p in self._trace.problems if "was too fast" not in p]
        self._trace.problems.append(text)

    def _full(self, moment: int) -> None:
        self._trace.last = max(self._trace.last, _whole(moment))
        self._trace.problems.append(
            f"the file of rank {self._trace.rank} was full after {moment / 1e9:.1f} s: trace a "
            f"shorter time, or give trace() more most_bytes"
        )

    def _complete(self, moment: int) -> None:
        self._trace.last = max(self._trace.last, _whole(moment))
        self._trace.complete = True
