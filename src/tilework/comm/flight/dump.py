"""Writing a rank's flight record: on faults, and when somebody asks.

Nothing here raises or waits, since it runs on the way to an error. If a record cannot be written,
one line on stderr says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

from tilework.comm.backends.per_device import DispatchGroup
from tilework.comm.contract import ProcessGroup
from tilework.comm.flight import document
from tilework.comm.flight.document import GroupLog, Record, RecordedFault, Stack, file_name
from tilework.comm.flight.watch import DIRECTORY_VARIABLE, WATCHER_NAME
from tilework.comm.per_call.callsite import format_site, in_library, stacks_of_threads, user_frame
from tilework.comm.world import World, current_world, live_worlds

#: Numbers of records in order of time: if two threads write one file, the later record wins.
_moments: Final = itertools.count(1)
_replacing: Final = threading.RLock()  # a signal handler may interrupt a writer
_MOST_SECONDS: Final = 2.0  # after a fork, the thread that held the lock is gone
_newest: Final[dict[str, int]] = {}

_OWN_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def note_fault(cause: BaseException | str) -> None:
    """Write the rank's flight record because of ``cause``, if asked to. Never raises or waits."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        return
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    fault = RecordedFault(time.time(), text, tuple(getattr(cause, "ranks", ())))
    # On a thread of the core, the rank is unknown: then write the records of all ranks.
    own_rank = _rank_of(current_world())
    for rank, worlds in _ranks().items():
        if own_rank is None or rank == own_rank:
            worlds[0].notes.add(fault)
            _write(rank, worlds, folder)


def write_all() -> None:
    """Write the flight records of all ranks of this process, if a folder is named. Never raises."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if folder:
        for rank, worlds in _ranks().items():
            _write(rank, worlds, folder)


def _ranks() -> dict[int, list[World]]:
    """The ranks of this process with their Worlds; before any group, the environment's rank."""
    worlds: dict[int, list[World]] = {}
    for world in sorted(live_worlds(), key=lambda world: world.default_group is None):
        rank = _rank_of(world)
        if rank is not None:
            worlds.setdefault(rank, []).append(world)
    text = os.environ.get("RANK", "")
    if not worlds and text.isdecimal():
        worlds[int(text)] = [current_world()]
    return worlds


def _rank_of(world: World) -> int | None:
    """The global rank that a World belongs to; None if the World has no group."""
    group = next(iter(list(world.records)), None)
    return None if group is None else group.global_ranks[group.rank()]


def _write(rank: int, worlds: Sequence[World], folder: str) -> None:
    """Write one rank's record in one step into ``folder``; report a failure once. Never raises."""
    path = os.path.join(folder, file_name(rank))
    try:
        moment = next(_moments)
        record = _record(rank, worlds)
        if record.groups or not _written_before(path):
            _replace(path, document.encode(record), moment)
    except Exception as error:
        _complain(worlds[0], folder, error)


def _record(rank: int, worlds: Sequence[World]) -> Record:
    """The flight record of ``rank`` at this moment; ``worlds`` are the rank's Worlds."""
    faults = sorted((f for world in worlds for f in world.notes.faults), key=lambda f: f.time)
    groups = [group for world in worlds for group in list(world.records)]
    return Record(
        rank=rank,
        world_size=1 + max((max(group.global_ranks) for group in groups), default=-1),
        host=socket.gethostname(),
        pid=os.getpid(),
        job=_job(),
        written=time.time(),
        faults=tuple(faults[: document.MAX_FAULTS]),
        stacks=tuple(_stacks(worlds[0].notes.thread)),
        groups=tuple(_groups(groups)),
        steps=max(world.notes.steps for world in worlds),
    )


def _written_before(path: str) -> bool:
    """True if ``path`` holds a record that this process wrote while it had groups."""
    try:
        with open(path, "rb") as file:
            before = document.decode(file.read(document.MAX_FILE_BYTES + 1))
    except (OSError, document.FlightRecordError):
        return False
    return before.pid == os.getpid() and before.job == _job() and bool(before.groups)


def _job() -> str:
    """An id of the launch, equal on all ranks, made from the job's secret; "" without a secret."""
    secret = os.environ.get("TILEWORK_SECRET", "")
    return hashlib.blake2b(secret.encode(), digest_size=8).hexdigest() if secret else ""


def _groups(groups: Sequence[ProcessGroup]) -> Iterator[GroupLog]:
    ends = [end for group in groups for end in _ends(group)][: document.MAX_GROUPS]
    for end in ends:
        entries = document.latest(end.flight_entries(), document.MAX_ENTRIES // len(ends) // 2)
        yield GroupLog(end.group_name, end.name(), end.group_desc, end.global_ranks, entries)


def _ends(group: ProcessGroup) -> list[ProcessGroup]:
    return group.ends if isinstance(group, DispatchGroup) else [group]


def _stacks(own: threading.Thread | None) -> Iterator[Stack]:
    """The stacks of all threads; the rank's own thread first (else the main thread)."""
    own = own or threading.main_thread()
    stacks = stacks_of_threads()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = sorted(stacks, key=lambda ident: ident != own.ident)
    for ident in idents[: document.MAX_STACKS]:
        name = names.get(ident, f"thread {ident}")
        if name != WATCHER_NAME:
            yield _stack(name, stacks[ident])


def _stack(name: str, stack: Sequence[FrameType]) -> Stack:
    frames = [*stack]
    while frames and frames[0].f_code.co_filename.startswith(_OWN_FOLDER):
        del frames[0]
    user = user_frame(frames[0]) if frames else None
    lines = [
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in frames
    ]
    return Stack(
        thread=name,
        frames=tuple(lines[: document.MAX_FRAMES]),
        site="" if user is None else format_site((user.f_code, user.f_lasti)),
        inside=bool(frames) and in_library[frames[0].f_code.co_filename],
    )


def _replace(path: str, data: bytes, moment: int) -> None:
    """Replace ``path`` by ``data`` in one step, unless a newer record is there."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    partial = f"{path}.{os.getpid()}-{threading.get_ident()}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(partial, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        locked = _replacing.acquire(timeout=_MOST_SECONDS)
        try:
            if _newest.get(path, 0) > moment:
                os.unlink(partial)
            else:
                os.replace(partial, path)
                _newest[path] = moment
        finally:
            if locked:
                _replacing.release()
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _complain(world: World, folder: str, error: Exception) -> None:
    if world.notes.complained:
        return
    world.notes.complained = True
    why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
    line = f"tilework: cannot write the flight record to {folder!r}: {why}\n"
    with contextlib.suppress(OSError, ValueError):
        # Not sys.stderr: this may interrupt a thread that writes to it.
        os.write(2, line.encode(errors="replace"))
