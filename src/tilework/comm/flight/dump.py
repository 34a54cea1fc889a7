"""Writing a rank's flight record: on faults, and when somebody asks.

Nothing here raises or waits for anybody, since it runs on the way to an error: a record that
cannot be written is one line on stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Final

from tilework.comm.callsite import format_site, in_library, user_frame
from tilework.comm.contract import ProcessGroup
from tilework.comm.dispatch import DispatchGroup
from tilework.comm.flight import document
from tilework.comm.flight.document import Fault, GroupLog, Record, Stack, file_name
from tilework.comm.flight.watch import DIRECTORY_VARIABLE, WATCHER_NAME
from tilework.comm.world import World, current_world, live_worlds

_OWN_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def note_fault(cause: BaseException | str) -> None:
    """Write the record of the rank that calls, because of ``cause``; nothing without a folder.

    Never raises and never blocks on other ranks. For the way to an error.
    """
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        return
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    fault = Fault(time.time(), text, tuple(getattr(cause, "ranks", ())))
    # A completion may come on a thread of the core, which is no rank's.
    mine = current_world()
    for world in [mine] if mine.records else _ranks():
        world.notes.add(fault)
        write(world, folder)


def write_all() -> None:
    """Write the records of all ranks of this process; nothing without a folder. Never raises."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    for world in _ranks() if folder else ():
        write(world, folder or "")


def write(world: World, folder: str) -> None:
    """Write one rank's record into ``folder``, in one step; or say why not, once. Never raises."""
    try:
        record = take(world)
        if record is None or (world.notes.told_groups and not record.groups):
            return  # a rank that has left its groups tells less than it did before
        _replace(os.path.join(folder, file_name(record.rank)), document.encode(record))
        world.notes.told_groups |= bool(record.groups)
    except Exception as error:
        _complain(world, folder, error)


def take(world: World) -> Record | None:
    """One rank's record as of now; None if it is not known which rank it is."""
    default = world.default_group
    rank = default.rank() if default is not None else _rank_setting()
    if rank is None:
        return None
    return Record(
        rank=rank,
        world_size=0 if default is None else default.size(),
        host=socket.gethostname(),
        pid=os.getpid(),
        job=_job(),
        written=time.time(),
        faults=tuple(world.notes.faults),
        stacks=tuple(_stacks(world.notes.thread)),
        groups=tuple(_groups(world)),
    )


def _ranks() -> list[World]:
    """The ranks that live in this process; before it has a group, the one that it will be."""
    return [world for world in live_worlds() if world.records] or [current_world()]


def _rank_setting() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _job() -> str:
    """Tells launches apart in a folder that is used again."""
    secret = os.environ.get("TILEWORK_SECRET", "")
    return hashlib.blake2b(secret.encode(), digest_size=8).hexdigest() if secret else ""


def _groups(world: World) -> Iterator[GroupLog]:
    ends = [end for group in list(world.records) for end in _ends(group)]
    ends = ends[: document.MAX_GROUPS]
    for end in ends:
        entries = document.latest(end.flight_entries(), document.MAX_ENTRIES // len(ends) // 2)
        yield GroupLog(end.group_name, end.name(), end.group_desc, end.global_ranks, entries)


def _ends(group: ProcessGroup) -> list[ProcessGroup]:
    return group.ends if isinstance(group, DispatchGroup) else [group]


def _stacks(own: threading.Thread | None) -> Iterator[Stack]:
    """Every thread's, the rank's own first (else the main one)."""
    own = own or threading.main_thread()
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = sorted(frames, key=lambda ident: ident != own.ident)
    for ident in idents[: document.MAX_STACKS]:
        name = names.get(ident, f"thread {ident}")
        if name != WATCHER_NAME:
            yield _stack(name, frames[ident])


def _stack(name: str, frame: FrameType | None) -> Stack:
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back  # this very writing
    user = user_frame(frame)
    lines = [
        f"{each.f_code.co_filename}:{line} in {each.f_code.co_name}"
        for each, line in traceback.walk_stack(frame)
    ]
    return Stack(
        thread=name,
        frames=tuple(lines[: document.MAX_FRAMES]),
        site="" if user is None else format_site((user.f_code, user.f_lasti)),
        inside=frame is not None and in_library[frame.f_code.co_filename],
    )


def _replace(path: str, data: bytes) -> None:
    """Make ``path`` hold ``data``: all of it, or what was there before."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    partial = f"{path}.{os.getpid()}-{threading.get_ident()}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(partial, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
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
        # Not sys.stderr: this may interrupt a thread that is just writing to it.
        os.write(2, line.encode(errors="replace"))
