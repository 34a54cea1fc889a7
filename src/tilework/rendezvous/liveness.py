"""The knowledge which ranks have ended: processes, or threads where ranks are threads.

A rank writes an identity into the group's registers when the group is made. Others ask the system
about it: the start time tells a process from a later one with the same number. A memory file that
the process keeps open until it ends or becomes another program (exec) tells the program from a
later one in the same process. A rank in another place (host, container) cannot be asked for: it
is neither known to live nor to have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_numbers = itertools.count(1)
#: The threads of this process that are ranks, by number: a thread's own number is used again.
_threads: WeakValueDictionary[int, threading.Thread] = WeakValueDictionary()
_own = threading.local()


def thread_identity() -> str:
    """A text that names this thread as a rank; others pass it to :func:`has_ended`."""
    if not hasattr(_own, "number"):
        _own.number = next(_numbers)
        _threads[_own.number] = threading.current_thread()
    return f"thread {_place()} {os.getpid()} {_own.number}"


def process_identity() -> str:
    """A text that names this process as a rank; others pass it to :func:`has_ended`."""
    return f"process {_place()} {os.getpid()} {start_time(os.getpid()) or 0} {_mark()}"


def has_ended(identity: str) -> bool:
    """True if the rank with this identity has ended; False also where that cannot be known."""
    parts = identity.split(" ")
    if len(parts) not in (4, 5) or parts[1] != _place():
        return False
    kind, _, pid, number = parts[:4]
    if kind == "process":
        ended = int(number) > 0 and start_time(int(pid)) != int(number)
        return ended or _has_lost(int(pid), *parts[4:])
    if int(pid) != os.getpid():
        return False
    thread = _threads.get(int(number))
    return thread is None or not thread.is_alive()


@dataclass(slots=True)
class _Mark:
    """The memory file that marks the program which runs in this process: exec closes the file.

    Attributes:
        descriptor: The descriptor of the file; -1 before the file is made.
        lock: Held while the file is made.
    """

    descriptor: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


_own_mark = _Mark()


def _mark() -> str:
    """The mark of this program, ``descriptor:inode`` of the memory file; "-" where it has none."""
    with _own_mark.lock, contextlib.suppress(OSError):
        if _own_mark.descriptor < 0 and sys.platform == "linux":
            _own_mark.descriptor = os.memfd_create("tilework-program", os.MFD_CLOEXEC)
        if _own_mark.descriptor >= 0:
            return f"{_own_mark.descriptor}:{os.fstat(_own_mark.descriptor).st_ino}"
    return "-"


def _has_lost(pid: int, mark: str = "-") -> bool:
    """True if process ``pid`` lives, but no longer has the memory file ``mark`` open.

    The process then runs another program. False where this process may not look.
    """
    descriptor, _, inode = mark.partition(":")
    if not inode:
        return False
    try:
        return os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino != int(inode)
    except FileNotFoundError:
        return os.path.exists(f"/proc/{pid}/stat")
    except (OSError, ValueError):
        return False


def _place() -> str:
    """A name for the place where process numbers are unique: this boot and PID namespace."""
    try:
        return f"{_boot()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # another system
        return "-"


@cache
def _boot() -> str:
    return _BOOT_ID.read_text().strip()


def start_time(pid: int) -> int | None:
    """The start time, in clock ticks since boot, of a process; None if it has ended."""
    status = status_of(pid)
    return status.start_time if status is not None and status.is_alive else None


class Status(NamedTuple):
    """The system's entry for a process."""

    #: The program's, as far as 15 letters go.
    name: str
    #: The time at which the process started, in the system's clock ticks since boot.
    start_time: int
    #: False where it has ended, and the parent has not asked how.
    is_alive: bool
    #: The number of the parent process.
    parent: int


def status_of(pid: int) -> Status | None:
    """A process's status; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    start, _, rest = text.rpartition(")")
    fields = rest.split()
    return Status(
        start.partition("(")[2], int(fields[19]), fields[0] not in ("Z", "X"), int(fields[1])
    )


def process_of(identity: str) -> tuple[int, int] | None:
    """The start time and number of a rank's process; None for a thread, or on another host."""
    kind, place, pid, number = identity.split(" ")[:4]
    return (int(number), int(pid)) if (kind, place) == ("process", _place()) else None
