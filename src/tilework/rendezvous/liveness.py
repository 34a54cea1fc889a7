"""The knowledge which ranks have ended: processes, or threads where ranks are threads.

A rank writes an identity into the group's registers when the group is made. Others ask the system
about it: the start time distinguishes a process from a later process with the same number. A memory
file that the process keeps open until it ends or becomes another program (exec) distinguishes the
program from a later one in the same process. A rank in another place (host, container) cannot be
asked for: it is neither known to live nor to have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Collection
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from tilework.errors import DistError
from tilework.memory_files import MemoryFile
from tilework.store import Store, UnixStore

#: Where the launcher publishes it, unless in the job's store.
ENDS_VARIABLE = "TILEWORK_ENDED_RANKS"
#: The launcher is on this host, and lives as long as the ranks.
_TIMEOUT = timedelta(seconds=5)

_KEY = "tilework/ended-ranks"


class EndedRanks:
    """The list in a store of a job's ranks that have ended and were not started again.

    The launcher keeps it in the job's store. If rank 0 serves that store, the launcher has a second
    store for the list: rank 0 may be the rank that has ended. A rank counts as ended after a
    failure, and also after the program has finished.
    """

    def __init__(self, store: Store) -> None:
        self._store = store.whole

    @classmethod
    def at_launcher(cls, rank: int, size: int) -> EndedRanks | None:
        """The list in the second store, which the launcher of this process serves for it.

        None if there is no second store, or if the launcher started this process as another rank
        than ``rank`` of ``size``.
        """
        environment = os.environ
        address = environment.get(ENDS_VARIABLE, "").removeprefix("unix:")
        started = environment.get("RANK"), environment.get("WORLD_SIZE")
        if not address or started != (str(rank), str(size)):
            return None
        with contextlib.suppress(DistError, OSError, ValueError):
            secret = bytes.fromhex(environment.get("TILEWORK_SECRET", "")) or None
            return cls(UnixStore(address, timeout=_TIMEOUT, secret=secret))
        return None

    def add(self, rank: int) -> None:
        """Note in the store that the process of ``rank`` has ended."""
        self._store.append(_KEY, f"{rank} ")

    def remove(self, rank: int) -> None:
        """Note in the store that ``rank`` was started again."""
        self._store.append(_KEY, f"-{rank + 1} ")

    def among(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` that the store lists as ended. Takes one or two requests."""
        ended: set[int] = set()
        if self._store.check([_KEY]):
            for number in map(int, self._store.get(_KEY).split()):
                (ended.add if number >= 0 else ended.discard)(max(number, -1 - number))
        return ended.intersection(ranks)


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


_marking = threading.Lock()


@cache
def _marking_file() -> MemoryFile:
    """The memory file that marks the program which runs in this process: exec closes the file."""
    return MemoryFile.create("program")


def _mark() -> str:
    """The mark of this program, ``descriptor:inode`` of the memory file; "-" where it has none."""
    with _marking, contextlib.suppress(OSError):
        fd = _marking_file().fd
        return f"{fd}:{os.fstat(fd).st_ino}"
    return "-"


def _has_lost(pid: int, mark: str = "-") -> bool:
    """True if process ``pid`` runs another program: lives, without the memory file ``mark``."""
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
    #: The letter of the state: T for a process that was stopped, but not by a debugger.
    state: str
    #: The number of the parent process.
    parent: int

    @property
    def is_alive(self) -> bool:
        """False where it has ended, and the parent has not asked how."""
        return self.state not in ("Z", "X")


def status_of(pid: int) -> Status | None:
    """A process's status; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    start, _, rest = text.rpartition(")")  # the name may have parentheses
    fields = rest.split()
    return Status(start.partition("(")[2], int(fields[19]), fields[0], int(fields[1]))


def process_of(identity: str) -> tuple[int, int] | None:
    """The start time and number of a rank's process; None for a thread, or on another host."""
    kind, place, pid, number = identity.split(" ")[:4]
    return (int(number), int(pid)) if (kind, place) == ("process", _place()) else None
