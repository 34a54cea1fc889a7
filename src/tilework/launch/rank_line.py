"""``tilework run --watch``: every some seconds a line about this host's ranks.

The launcher asks the ranks for their flight records, by the signal that it has for failures, and
judges them as ``tilework explain`` does. So ranks do nothing for it between two lines.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tilework.comm.launching import (
    LAUNCHER_SIGNAL,
    RUNNING,
    Entry,
    History,
    Record,
    blocking,
    diagnose,
    named,
)
from tilework.launch.flight_records import read_latest_run
from tilework.launch.process import RankProcess
from tilework.show import bytes_text

#: Seconds that ranks have to answer, at most half of the interval; and between two looks.
_PATIENCE: Final = 2.0
_LOOK_SECONDS: Final = 0.05
#: Findings that explain why ranks stand still.
_STANDING: Final = ("deadlock", "mismatch", "failed", "waiting", "message", "busy")


@dataclass
class RankLine:
    """Asks, reads and writes a line every ``seconds``; the supervisor's loop calls :meth:`look`."""

    seconds: float
    folder: Path
    write: Callable[[str], None]
    #: When to look again, on the monotonic clock.
    due: float = field(init=False)
    _next: float = field(init=False)
    _asked: float = 0.0
    _before: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next = self.due = time.monotonic() + self.seconds

    def look(self, ranks: Sequence[RankProcess], ask: Callable[[int], None]) -> None:
        """Ask the ranks of this host, by a signal, if it is time; write the line once they have
        answered, or had time to.
        """
        now = time.monotonic()
        if now < self.due:
            return
        if not self._asked:
            self._asked = time.time()
            if LAUNCHER_SIGNAL is not None:
                ask(LAUNCHER_SIGNAL)
            self.due = now + _LOOK_SECONDS
            return
        pids = {rank.rank: rank.pid for rank in ranks if rank.alive}
        records = self._answers(pids)
        if len(records) < len(pids) and now < self._next + min(_PATIENCE, self.seconds / 2):
            self.due = now + _LOOK_SECONDS
            return
        if pids:
            self.write(self._line(records, pids))
        self._asked = 0.0
        self._next = self.due = max(now, self._next + self.seconds)

    def _answers(self, pids: Mapping[int, int]) -> dict[int, Record]:
        records: dict[int, Record] = {}
        with contextlib.suppress(OSError):  # nobody has written yet
            records = read_latest_run(self.folder).records
        return {r: each for r, each in records.items() if r in pids and each.written >= self._asked}

    def _line(self, records: dict[int, Record], pids: Mapping[int, int]) -> str:
        silent = pids.keys() - records.keys()
        parts = [self._steps(records), behind(records, self.seconds), share_of_waiting(records)]
        parts += [f"no answer from {named(silent)}" if silent else "", memory_of(pids)]
        return "; ".join(part for part in parts if part)

    def _steps(self, records: Mapping[int, Record]) -> str:
        """The steps so far, and since the last line; "" if no rank has told."""
        if not records:
            return ""
        steps = {rank: record.steps for rank, record in records.items()}
        before, self._before = self._before, steps
        if not any(steps.values()):
            return "no step yet"
        least, most = min(steps.values()), max(steps.values())
        since = max(steps[rank] - before.get(rank, 0) for rank in steps)
        text = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
        return f"{text} (+{since:,})"


def behind(records: Mapping[int, Record], seconds: float) -> str:
    """The rank that the others wait for, in words; "" if the work is even.

    Ranks stand still if an operation has run for ``seconds``.
    """
    findings = diagnose(records) if records else []
    running = [
        record.written - entry.entered
        for record in records.values()
        for log in record.groups
        for entry in log.entries
        if entry.outcome == RUNNING
    ]
    kinds = _STANDING if max(running, default=0.0) >= seconds else ("slow",)
    told = (finding.text.rstrip(".") for finding in findings if finding.kind in kinds)
    return next(told, "no rank is behind" if records else "")


def share_of_waiting(records: Mapping[int, Record]) -> str:
    """The part of the time of the recorded operations in which ranks wait for each other."""
    shares = {}
    history = History(records)
    for rank, record in records.items():
        entries = [entry for log in record.groups for entry in log.entries]
        if entries:
            length = record.written - min(entry.entered for entry in entries)
            waits = sum(_waits(history, rank, entries, record.written))
            shares[rank] = waits / max(length, 1e-9)
    if not shares:
        return ""
    most = max(shares, key=lambda rank: shares[rank])
    return (
        f"waiting {sum(shares.values()) / len(shares):.0%}, at most rank {most} {shares[most]:.0%}"
    )


def _waits(history: History, rank: int, entries: Sequence[Entry], now: float) -> Iterator[float]:
    """The seconds in each blocking collective until the last rank entered, or until now."""
    for group in history.groups:
        calls = group.calls.get(rank, {}).values()
        over = [replace(each, ended=now) if each.outcome == RUNNING else each for each in calls]
        for entry in blocking(over, entries):
            last = max(each.entered for each in group.at(entry.number).values())
            last = now if group.absent(entry.number) else last
            yield max(0.0, min(last, entry.ended or now) - entry.entered)


def memory_of(pids: Mapping[int, int]) -> str:
    """The resident memory of processes by rank, in words; "" where the system does not tell."""
    sizes = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            sizes[rank] = pages * os.sysconf("SC_PAGE_SIZE")
    if not any(sizes.values()):  # processes that end have none
        return ""
    most = max(sizes, key=lambda rank: sizes[rank])
    return f"memory {bytes_text(sizes[most])} at most (rank {most})"
