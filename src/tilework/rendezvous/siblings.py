"""The ranks that were started beside this rank: processes with the same parent.

They were started by a shell, a script, or a launcher that does not report the ends of ranks. The
system shows the environment of each process, with the rank, from the start. So ranks notice the end
of a process that they have seen, even if that rank has never sent a message.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tilework.rendezvous.environment import Settings, detect_environment
from tilework.rendezvous.liveness import process_of, start_time, status_of

#: Seconds without any process of a rank before it counts as ended: another may take the place.
_GONE_SECONDS = 0.6
#: Looking takes at most this share of the time.
_SHARE = 0.02
#: What else ranks of one job have in common.
_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT", "TILEWORK_STORE", "TORCHELASTIC_RUN_ID")


class Siblings:
    """The other ranks of this job among the processes with the same parent.

    A process's environment names the job and the rank. There are no siblings where the environment
    of this process names no rank, for example where ranks are threads.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        environment = dict(os.environ)
        self._mine = _settings(environment)
        several = self._mine is not None and self._mine.world_size > 1
        self._job = _job(self._mine, environment) if self._mine is not None and several else None
        #: The rank by process and start time; None for a process of another job.
        self._ranks: dict[tuple[int, int], int | None] = {}
        self._seen: set[int] = set()
        #: By rank that was seen: the time since when no process of that rank has been there.
        self._gone: dict[int, float] = {}
        self._next_look = 0.0
        self.look()

    @staticmethod
    def of(rank: int, size: int) -> Siblings | None:
        """The siblings of this process; None if the environment says another rank or size."""
        known = _at_import if _at_import.is_of(rank, size) else Siblings()
        return known if known.is_of(rank, size) else None

    def is_of(self, rank: int, size: int) -> bool:
        """True if the environment says that this process is ``rank`` of ``size``."""
        mine = self._mine and (self._mine.rank, self._mine.world_size)
        return self._process == os.getpid() and mine == (rank, size)

    def ended(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` whose process was seen, but has been gone for 0.6 s by now."""
        self.look()
        now = time.monotonic()
        return {r for r in ranks if r in self._gone and now - self._gone[r] > _GONE_SECONDS}

    def look(self) -> None:
        """Update which ranks have a living process, unless the last look was a moment ago."""
        begun = time.monotonic()
        if self._job is None or begun < self._next_look:
            return
        here = set(self._here())
        self._seen |= here
        self._gone = {rank: self._gone.get(rank, begun) for rank in self._seen - here}
        now = time.monotonic()
        self._next_look = now + (now - begun) / _SHARE

    def _here(self) -> Iterator[int]:
        """The other ranks of this job of which a process lives now."""
        parent, known = os.getppid(), self._ranks
        self._ranks = {}
        for pid in children(parent):
            started = start_time(pid)
            if started is None or pid == os.getpid():
                continue
            process = pid, started
            rank = known[process] if process in known else self._rank_of(pid)
            self._ranks[process] = rank
            if rank is not None:
                yield rank

    def _rank_of(self, pid: int) -> int | None:
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            return None
        environment = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        settings = _settings(environment)
        if settings is None or _job(settings, environment) != self._job:
            return None
        return settings.rank


def children(parent: int) -> Iterator[int]:
    """The numbers of the child processes of ``parent``, with those that wait to be reaped."""
    try:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:  # another system, or the parent has just ended
        return


def _settings(environment: dict[str, str]) -> Settings | None:
    try:
        return detect_environment(environment)
    except ValueError:
        return None


def _job(settings: Settings, environment: dict[str, str]) -> tuple[object, ...]:
    """A tuple that is equal for processes that are ranks of one job."""
    place = tuple(environment.get(name) for name in _MEETING_PLACE)
    return settings.launcher, settings.world_size, settings.job, *place


#: Made as early as can be: a rank that ends before the ranks meet has been seen then.
_at_import = Siblings()


#: The same where it is unknown which ranks these are: others may still come, and leave only those.
_DOUBT_SECONDS = 1.2
#: The argument of a fresh interpreter of multiprocessing; a fork has the parent's command line.
_FRESH = b"--multiprocessing-fork\0"
#: The process that multiprocessing lets fork others.
_FORK_SERVER = b"multiprocessing.forkserver"

#: By start time, in ticks of the system, and number: in the order in which they were started.
_Process = tuple[int, int]


class MultiprocessingChildren:
    """The processes that may be the ranks of a job with this process.

    If multiprocessing started this process, these are the processes with the same parent. Else they
    are this process and the processes that it has started.
    """

    def __init__(self) -> None:
        self._own = _process(os.getpid())
        self._number = _own_number()
        self._root = _process(os.getppid() if self._number else os.getpid())
        # Where a launcher has numbered this process, those that it has started are no ranks.
        self._has_none = not self._number and _is_launched()
        self._command = _read(self._root, "cmdline")
        status = status_of(self._root[1])
        self._name = status.name if status is not None else ""
        #: All that were ever seen, and those that lived at the last look.
        self._seen, self._here = {self._own}, {self._own}
        #: How many are missing, and since when; not those that have heard of it and gone, too.
        self._missing: tuple[int, float] | None = None
        self._next_look = 0.0
        self.look()

    @staticmethod
    def of_this_process() -> MultiprocessingChildren:
        """The object for this process. A forked child makes another object."""
        global _known
        if _known._own[0] != os.getpid():  # it was forked
            _known = MultiprocessingChildren()
        return _known

    def ended(self, size: int, identities: Collection[str], silent: int) -> int:
        """The number of ranks that ended before they announced their identity, as of now.

        ``identities`` are of the ranks that have announced one, with this rank; ``silent`` counts
        the others.
        """
        self.look()
        count = self._count_missing(size, identities)
        if not count:
            self._missing = None
            return 0
        now = time.monotonic()
        if self._missing is None or count < self._missing[0]:
            self._missing = count, now
        count, since = self._missing
        patience = _GONE_SECONDS if count >= silent else _DOUBT_SECONDS
        return count if now - since > patience else 0

    def look(self) -> None:
        """Update which processes live, unless the last look was a moment ago."""
        begun = time.monotonic()
        if self._has_none or begun < self._next_look or _process(self._root[1]) != self._root:
            return
        self._here = {self._own, *self._living()}
        self._seen |= self._here
        now = time.monotonic()
        self._next_look = now + (now - begun) / _SHARE

    def _living(self) -> Iterator[_Process]:
        """The processes that live now. Processes that wait to be reaped are added to those seen."""
        for pid in children(self._root[1]):
            status = status_of(pid)
            if status is None:
                continue
            process = status.start_time, pid
            if not status.is_alive and status.name == self._name:
                self._seen.add(process)
            # One that has become another program since may come yet.
            if status.is_alive and (process in self._seen or self._is_kin(process)):
                yield process

    def _is_kin(self, process: _Process) -> bool:
        command = _read(process, "cmdline")
        return command.endswith(_FRESH) or command == self._command

    def _count_missing(self, size: int, identities: Collection[str]) -> int:
        """The number of exactly ``size`` processes that ended without an identity; else 0."""
        came = {process_of(identity) for identity in identities}
        known = self._seen | ({self._root} & came)
        # The processes that a rank has started need not be ranks, unless one of them is.
        if not came <= known or (self._root == self._own and came == {self._own}):
            return 0
        gone = len(known - self._here - came)
        # Those before this one that had ended when it looked for the first time.
        unseen = max(0, self._number - sum(process <= self._own for process in self._seen))
        if len(known) + unseen == size:
            return gone + unseen
        return gone if len(known) == size else 0


def _own_number() -> int:
    """The number that multiprocessing gave this process; 0 if it did not start this process."""
    module = sys.modules.get("multiprocessing.process")
    starter = None if module is None else module.parent_process()
    if module is None or starter is None:
        return 0
    parent = os.getppid()
    if parent != starter.pid and not _is_fork_server(parent):
        return 0  # forked without multiprocessing, by a process that was started with it
    identity: tuple[int, ...] = module.current_process()._identity
    return identity[-1] if identity else 0


def _is_fork_server(pid: int) -> bool:
    """True for multiprocessing's fork server; False for forks of it, which look the same."""
    command, status = _read(_process(pid), "cmdline"), status_of(pid)
    if _FORK_SERVER not in command or status is None:
        return False
    return command != _read(_process(status.parent), "cmdline")


def _is_launched() -> bool:
    try:
        return detect_environment() is not None
    except ValueError:
        return True


def _process(pid: int) -> _Process:
    """The start time and number of process ``pid``; the time is 0 if it has ended."""
    return start_time(pid) or 0, pid


def _read(process: _Process, what: str) -> bytes:
    """The content of ``/proc/NUMBER/what`` for ``process``; empty if the process has ended."""
    try:
        return Path(f"/proc/{process[1]}/{what}").read_bytes()
    except OSError:
        return b""


#: Made as early as can be: one that ends before the ranks meet has been seen then.
_known = MultiprocessingChildren()
