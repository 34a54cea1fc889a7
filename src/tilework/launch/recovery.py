"""The answer to a rank's death: start it again, continue without it, or end the job.

Also the report of events with their times.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tilework.launch.failure_report import RankFailure
from tilework.launch.failure_text import cause

#: The error of a rank that was left behind: the end does not follow from another failure.
_EXCLUDED = "tilework.errors.ExcludedError"
#: Seconds by which the clocks of hosts may differ.
_CLOCK_SECONDS: Final = 1.0


class Answer(enum.Enum):
    """The launcher's answer to a rank's end."""

    RESTART = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()


@dataclass(frozen=True)
class Happening:
    """A line of the report on lost and new ranks: time, rank and text."""

    #: Seconds since the ranks were started; infinity: not known.
    seconds: float
    #: The rank that the line is about; None: the whole job.
    rank: int | None
    #: The line, without the time.
    text: str


@dataclass
class Recovery:
    """The policy of a job for ranks that die, and the record of lost and new ranks.

    Ranks may be started again ``restarts`` times in total, and at least ``least`` must go on.
    ``happenings`` are in the order in which the launcher notes them, not of time, as
    :meth:`note_told` adds events of ranks at the end of the job.
    """

    restarts: int
    least: int
    happenings: list[Happening] = field(default_factory=list)
    #: Ranks that have ended in order.
    _finished: list[Happening] = field(default_factory=list)
    #: The last members of the group; None if the group has not changed.
    _seats: Sequence[int] | None = None
    _used: int = 0
    _began: float = field(default_factory=time.monotonic)
    _began_wall: float = field(default_factory=time.time)

    def answer(self, failure: RankFailure, others: int) -> Answer:
        """The answer to a failure while ``others`` other ranks train; the answer is noted.

        A rank that fails because it lost another rank runs a program that does not outlive ranks:
        then the job ends like any other job. It also ends if the other ranks have finished: nobody
        is left to do the rest, such as writing the model.
        """
        self.note(failure.rank, cause(failure))
        excluded = failure.report is not None and _EXCLUDED in failure.report.classes
        if failure.is_consequence and not excluded:
            self.note(failure.rank, "the program cannot continue without lost ranks: the job ends")
            return Answer.END
        if others >= 1 and self._used < self.restarts:
            self._used += 1
            self.note(failure.rank, f"started again ({self._used} of {self.restarts} restarts)")
            return Answer.RESTART
        least = max(1, self.least)
        if others >= least:
            return Answer.GO_ON
        if others == 0 and self._finished:
            self.note(None, "the others have finished: nobody is left to do what it was doing")
        else:
            self.note(None, f"{_count(others)} left, at least {least} needed")
        return Answer.END

    def note_finished(self, rank: int) -> None:
        """Note that a rank has ended in order; reported only if the group went on without it."""
        seconds = time.monotonic() - self._began
        self._finished.append(Happening(seconds, rank, "ended (exit code 0)"))

    def note(self, rank: int | None, text: str) -> None:
        self.happenings.append(Happening(time.monotonic() - self._began, rank, text))

    def note_told(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Note events that ranks told of, with the times of their hosts' clocks."""
        so_far = time.monotonic() - self._began
        for event in events:
            self._seats = event["seats"] if event["kind"] in _CHANGES else self._seats
            describe = _TEXTS.get(event["kind"])
            if describe is not None:
                text, seconds = describe(event), event["time"] - self._began_wall
                if not -_CLOCK_SECONDS < seconds < so_far + _CLOCK_SECONDS:
                    at = time.strftime("%H:%M:%S", time.gmtime(event["time"]))
                    text += f" (at {at} UTC by the clock of {event['host']}, which differs)"
                    seconds = math.inf
                self.happenings.append(Happening(seconds, None, text))

    def report(self) -> str:
        """The lines of the report; empty if nothing has happened."""
        if not self.happenings:
            return ""
        left = (
            [] if self._seats is None else [h for h in self._finished if h.rank not in self._seats]
        )
        rows = sorted([*self.happenings, *left], key=lambda happening: happening.seconds)
        lines = ["ranks came and went:", f"{'time':>10}  {'rank':>4}  what happened"]
        for row in rows:
            rank = "" if row.rank is None else str(row.rank)
            seconds = "?" if row.seconds == math.inf else f"{row.seconds:.2f}"
            lines.append(f"{seconds:>8} s  {rank:>4}  {row.text}")
        return "\n".join(lines)


def _ranks(event: Mapping[str, Any]) -> str:
    seats = event["seats"]
    return f"rank{'s' * (len(seats) != 1)} {', '.join(map(str, seats))}"


def _count(ranks: int) -> str:
    return "1 rank is" if ranks == 1 else f"{ranks} ranks are"


#: Events after which the group has other ranks.
_CHANGES: Final = ("shrunk", "grown")

_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "shrunk": lambda event: f"the group continues with {_ranks(event)}",
    "grown": lambda event: f"let in; the group has {_ranks(event)}",
    "resumed": lambda event: (
        f"training continues after step {event['steps']}, {event['seconds'] * 1000:.0f} ms later"
    ),
    "stopped": lambda event: f"training stopped after step {event['steps']}: {event['reason']}",
}
