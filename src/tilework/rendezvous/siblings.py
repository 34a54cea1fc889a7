"""The ranks that were started beside this one: processes with the same parent, and a rank each.

A shell, a script, or a launcher that does not report the ends of ranks has started the processes.
Each has the rank in the environment, where the system shows it from the start. So the ranks that
have seen a process notice when it ends, even before that rank has talked to anybody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tilework.rendezvous.environment import Settings, detect_environment
from tilework.rendezvous.liveness import start_time

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
