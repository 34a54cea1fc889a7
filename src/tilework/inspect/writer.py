"""A rank's writer: what the rank does goes to the rank's file, some times a second."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tilework.comm.backends.machine import host_calibration
from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import Tail, Timed, What, describe
from tilework.comm.world import GroupRecord, World, live_worlds
from tilework.inspect.format import MARK, MOST_BYTES, MOST_TEXT_CHARS, VERSION, TraceError
from tilework.inspect.torch_hooks import ProfiledEvent, count_steps, follow_profiler
from tilework.store import Store

#: Seconds between two looks at the rings: fewer while operations come fast.
_MOST_SECONDS: Final = 0.25
_LEAST_SECONDS: Final = 0.004
#: Operations of one look from which on the next look comes sooner.
_MANY: Final = 1024
#: The most spans that are kept between two looks.
_MOST_EVENTS: Final = 1 << 16
#: The least time between two notes of the memory.
_MEMORY_NANOSECONDS: Final = 1_000_000
#: The key with the id of the job, in the store of the first group.
_JOB_KEY: Final = "tilework_trace_job"
#: The most texts that a file may have.
_MOST_TEXTS: Final = 1 << 16


class Writer:
    """Writes the operations and spans of one rank into a folder, which all ranks of the job share.
    The World's sink while it runs.

    The file is not made larger than ``most_bytes``; later events are left out.
    """

    def __init__(self, folder: Path, world: World, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self._world, self._left = folder, world, most_bytes
        #: The rank's Worlds: each group of torch.distributed has another, without a default group.
        self._worlds = [world]
        if world.local_rank is None:  # else ranks share the process
            alone = (w for w in live_worlds() if w.local_rank is None and w.default_group is None)
            self._worlds += [each for each in alone if each is not world]
        self._began = time.monotonic_ns()
        self._lines = _Lines(self._began)
        self._tails: list[tuple[int, Tail]] = []
        self._groups: list[ProcessGroup] = []
        #: (time, thread, name of the span that begins, or None at an end).
        self._events: deque[tuple[int, int, str | None]] = deque()
        self._lost_spans, self._told_lost = 0, (0, 0)
        #: Lines and events of torch. Whoever adds takes no lock: it may be a finalizer.
        self._notes: deque[tuple[object, ...] | ProfiledEvent] = deque()
        #: The memory by use: when it was noted last, and what changed since.
        self._memory_at = 0
        self._memory: dict[str, int] = {}
        self._fd, self._rank, self._pid = -1, -1, os.getpid()
        secret = os.environ.get("TILEWORK_SECRET", "")
        #: An id of the job: equal on all ranks, and another for the next job.
        self._job = _digest(secret) if secret else ""
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tilework-trace", daemon=True)

    def start(self) -> None:
        """Begin to write; refuse if the rank is traced already, or the folder cannot be made."""
        if self._world.sink is not None:
            raise TraceError(
                "this rank is traced already (by an outer trace(), or by tilework run --trace): "
                "end that trace first, or leave this trace out"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(
                f"the folder {str(self.folder)!r} for the trace cannot be made: {error.strerror}"
            ) from None
        follow_profiler()
        count_steps()
        for world in self._worlds:
            world.sink = self
            for record in list(world.records.values()):
                self.see(record)
        self._thread.start()

    def stop(self) -> None:
        """Write the rest, and close the file. Idempotent."""
        if self._stopping.is_set() or os.getpid() != self._pid:  # a forked child is not the rank
            return
        self._stopping.set()
        self._thread.join()
        for world in {*self._worlds, *live_worlds()}:
            if world.sink is self:
                world.sink = None
        for group in self._groups:
            group.cut_tails()
        self._look(final=True)
        if self._fd >= 0:
            os.close(self._fd)

    # -- the sink ------------------------------------------------------------------------

    def see(self, record: GroupRecord) -> None:
        group = record.group
        if group in self._groups:  # a group under a group of torch
            return
        tails = group.flight_tails()
        with self._lock:
            self._groups.append(group)
            if self._rank < 0 and tails:
                self._rank = group.global_ranks[group.rank()]
                self._job = self._job or _job_of(record.store)
            self._tails += [(self._lines.group(group), tail) for tail in tails]

    def begin(self, name: str) -> None:
        self._add((time.monotonic_ns(), threading.get_ident(), str(name)))

    def end(self) -> None:
        self._add((time.monotonic_ns(), threading.get_ident(), None))

    def note_step(self) -> None:
        self._notes.append(("s", time.monotonic_ns() - self._began))

    def take_profile(self, events: Iterable[ProfiledEvent]) -> None:
        self._notes.extend(event for event in events if event.start >= self._began)

    def note_memory(self, by_use: Mapping[str, int]) -> None:
        now = time.monotonic_ns()
        self._memory = dict(by_use)
        if now - self._memory_at >= _MEMORY_NANOSECONDS:
            self._memory_at = now
            self._notes.append(("m", now - self._began, self._memory))
            self._memory = {}

    def _add(self, event: tuple[int, int, str | None]) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
        else:
            self._lost_spans += 1

    # -- writing -------------------------------------------------------------------------

    def _run(self) -> None:
        seconds = _MOST_SECONDS
        while not self._stopping.wait(seconds):
            many = self._look() >= _MANY
            seconds = max(_LEAST_SECONDS, seconds / 2) if many else min(_MOST_SECONDS, 2 * seconds)

    def _look(self, final: bool = False) -> int:
        """Write what is new; returns the number of operations. Never raises."""
        try:
            with self._lock:
                count = self._collect(final)
                if self._rank >= 0 or final:  # else the rank is unknown, as without a group
                    self._write(self._lines.take())
            return count
        except Exception as error:  # the program must go on
            self._left = -1
            why = (isinstance(error, OSError) and error.strerror) or repr(error)
            line = f"tilework: the trace in {str(self.folder)!r} ends here: {why}\n"
            with suppress(OSError):
                os.write(2, line.encode(errors="replace"))
            return 0

    def _collect(self, final: bool) -> int:
        count = 0
        for number, tail in self._tails:
            operations = tail.read()
            count += len(operations)
            for operation in operations:
                self._lines.operation(number, operation)
        for _ in range(len(self._events)):
            self._lines.event(*self._events.popleft())
        for _ in range(len(self._notes)):
            self._lines.note(self._notes.popleft())
        memory, self._memory = self._memory, {}
        if memory:
            self._lines.add("m", time.monotonic_ns() - self._began, memory)
        lost = sum(tail.lost for _, tail in self._tails), self._lost_spans
        if lost != self._told_lost:
            self._told_lost = lost
            self._lines.add("l", *lost)
        if final:
            self._lines.add("z", time.monotonic_ns() - self._began)
        return count

    def _write(self, data: bytes) -> None:
        if self._left < 0 or not data:
            return
        if self._fd < 0:
            self._open()
        self._left -= len(data)
        if self._left < 0:
            data = f'["x",{time.monotonic_ns() - self._began}]\n'.encode()
        while data:
            data = data[os.write(self._fd, data) :]

    def _open(self) -> None:
        if self._rank < 0:
            told = os.environ.get("RANK", "")
            own = self._world.local_rank
            self._rank = own if own is not None else int(told) if told.isdecimal() else 0
        job = self._job = self._job or _digest(f"{_clock()} {os.getpid()}")
        path = self.folder / f"rank-{self._rank}.jsonl"
        for life in range(1, 1000):  # ranks that were started again have files of their own
            if not _is_of_job(path, job):
                break
            path = self.folder / f"rank-{self._rank}.{life}.jsonl"
        if self._rank == 0:
            _remove_others(self.folder, job)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.write(self._fd, json.dumps(self._header()).encode() + b"\n")

    def _header(self) -> dict[str, Any]:
        return {
            MARK: VERSION,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": self._job,
            "clock": _clock(),
            "began": self._began,
            "wall": time.time_ns() - (time.monotonic_ns() - self._began),
            "thread": self._lines.own_thread,
            "limits": _limits() if any(g.name() == "shm" for g in self._groups) else {},
        }


class _Lines:
    """Makes lines of events; texts and threads are written once."""

    def __init__(self, began: int) -> None:
        self._began = began
        self._lines: list[str] = []
        self._texts: dict[str, int] = {}
        self._whats: dict[What | str, tuple[int, int]] = {}
        self._threads: set[int] = set()
        self._groups = 0
        #: The tracks of torch's profiler.
        self._tracks: dict[str, int] = {}
        #: The thread that began the trace: the rank's own.
        self.own_thread = threading.get_ident()

    def add(self, *event: object) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":")) + "\n")

    def take(self) -> bytes:
        lines, self._lines = self._lines, []
        return "".join(lines).encode()

    def group(self, group: ProcessGroup) -> int:
        self._groups += 1
        names = group.group_name, group.name(), group.group_desc
        self.add("g", self._groups, *names, group.global_ranks)
        return self._groups

    def operation(self, group: int, op: Timed) -> None:
        what, size = self._what(op.what)
        site, outcome = self._text(op.site), self._text(op.outcome)
        began = self._began
        times = [each and each - began for each in (op.entered, op.waited, op.finished, op.ended)]
        entered, waited, finished, ended = times
        peer = "null" if op.peer is None else op.peer
        self._lines.append(
            f'["o",{group},{op.key},{op.number},{what},{site},{peer},{op.tag},{entered},{waited},'
            f"{finished},{ended},{outcome},{size}]\n"
        )

    def event(self, moment: int, thread: int, name: str | None) -> None:
        if thread not in self._threads and len(self._threads) < _MOST_TEXTS:
            self._threads.add(thread)
            names = {each.ident: each.name for each in threading.enumerate()}
            self.add("h", thread, names.get(thread, "a thread that has ended"))
        if name is None:
            self._lines.append(f'["e",{thread},{moment - self._began}]\n')
        else:
            text = self._text(name)
            self._lines.append(f'["b",{thread},{moment - self._began},{text}]\n')

    def note(self, event: tuple[object, ...] | ProfiledEvent) -> None:
        if not isinstance(event, ProfiledEvent):
            self.add(*event)
            return
        known = len(self._tracks)
        track = self._tracks.setdefault(event.track, -1 - known)
        if len(self._tracks) > known:
            self.add("h", track, f"torch: {event.track}")
        times = event.start - self._began, event.end - self._began
        self.add("p", track, *times, self._text(event.name))

    def _what(self, what: What | str) -> tuple[int, int]:
        try:
            known = self._whats.get(what)
        except TypeError:  # shapes in a list
            return self._text(describe(what)), bytes_of(what)
        if known is None:
            known = self._text(describe(what)), bytes_of(what)
            if len(self._whats) < _MOST_TEXTS:
                self._whats[what] = known
        return known

    def _text(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None:
            if len(self._texts) >= _MOST_TEXTS:
                text = "…"
            number = self._texts.setdefault(text, len(self._texts))
            self.add("t", number, text[:MOST_TEXT_CHARS])
        return number


_DESCRIBED: Final = re.compile(r"\w+ (\w+) \[([\d, ]*)\]")


def bytes_of(what: What | str) -> int:
    """The bytes of an operation's tensors on this rank: of all inputs, or of outputs if more."""
    if isinstance(what, str):
        found = _DESCRIBED.match(what)  # a message, whose text the group makes
        if found is None:
            return 0
        sizes = [int(size) for size in found[2].split(",") if size.strip()]
        what = ("", found[1], [sizes], [], None, None)
    _, dtype, inputs, outputs, _, _ = what
    elements = (sum(map(math.prod, shapes)) for shapes in (inputs, outputs))
    return _item_bytes(str(dtype)) * max(elements)


def _item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _job_of(store: Store) -> str:
    """An id that the ranks of a store agree on: the first rank to ask makes it."""
    with suppress(
        Exception
    ):  # a store that is closed, or lacks this: then the id is of this process
        return store.compare_set(_JOB_KEY, "", secrets.token_hex(8)).decode()
    return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _clock() -> str:
    """An id of the monotonic clock: of the host's boot, and of a container's own time."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):
            return f"{boot} {os.readlink('/proc/self/ns/time')}"
        return boot
    return socket.gethostname()


def _limits() -> dict[str, float]:
    limits: dict[str, float] = {}
    for operation, size, _, seconds in host_calibration().measurements:
        limits[operation] = max(limits.get(operation, 0.0), size / max(seconds, 1e-9))
    return limits


def _is_of_job(path: Path, job: str) -> bool:
    header = _header_of(path)
    return header is not None and header.get("job") == job and header.get("pid") != os.getpid()


def _remove_others(folder: Path, job: str) -> None:
    for path in folder.glob("rank-*.jsonl"):
        header = _header_of(path)
        if header is not None and header.get("job") != job:
            with suppress(OSError):
                path.unlink()


def _header_of(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        with open(path, "rb") as file:
            header = json.loads(file.readline(1 << 16))
        return header if isinstance(header, dict) and MARK in header else None
    return None
