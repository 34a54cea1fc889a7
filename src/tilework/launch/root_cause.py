"""The root cause among ranks' failures, not its consequences. Pure; no processes here.

When a rank dies, its peers fail a moment later because they miss it, and the launcher may hear
of them first. So failures are collected for a moment. Among them, one that does not look like
the consequence of another is preferred, and then the earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tilework.launch.failure_report import FailureReport

#: How long to collect when something that looks like a cause has been seen.
SETTLE_SECONDS: Final = 0.1
#: How long to wait for a cause when only consequences have been seen.
PATIENCE_SECONDS: Final = 0.5

#: A death by signal is noticed later than it happened, reports carry the time of the failure.
_NOTICED_LATE_SECONDS: Final = 0.1

#: Classes that say "another rank is at fault", or may well follow from that.
_CONSEQUENCES: Final = re.compile(
    r"tilework\.errors\.(PeerLostError|DistNetworkError|DistStoreError|CollectiveTimeoutError)"
    r"|builtins\.ConnectionError"
    r"|torch\.distributed\.Dist(Backend|Network|Store)Error"
)
#: torch's Gloo says it in plain RuntimeErrors.
_CONSEQUENCE_TEXTS: Final = re.compile(r"gloo/transport|Connection closed by peer")


@dataclass(frozen=True)
class Failure:
    """A rank that failed by itself, not because the launcher ended it."""

    rank: int
    time: float
    """``time.monotonic()`` when it failed, or when that was noticed."""
    code: int
    """Exit code, or minus the number of the signal that ended it."""
    report: FailureReport | None = None
    """Its report; None after a signal or ``os._exit``."""
    crash_trace: str = ""
    """faulthandler's trace of a crash in native code."""
    node: str = ""
    """The node that it ran on, in words, if that is another one: there its traceback is printed."""
    lost_node: str = ""
    """The ranks in words, if their whole node is gone, and ``rank`` is but the first of them."""

    @property
    def exit_status(self) -> int:
        """As a shell shows it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def signal(self) -> int | None:
        """The signal that ended it; None if it exited."""
        return -self.code if self.code < 0 else None

    @property
    def traceback(self) -> str:
        """Its traceback, or the trace of its crash; empty if it left neither."""
        return self.report.traceback if self.report and self.report.traceback else self.crash_trace

    @property
    def is_consequence(self) -> bool:
        """True if this may be a consequence of another rank's failure."""
        if self.report is None:
            return self.signal == signal.SIGABRT  # native code gives up so when a peer is gone
        return any(map(_CONSEQUENCES.fullmatch, self.report.classes)) or bool(
            _CONSEQUENCE_TEXTS.search(self.report.summary)
        )

    @property
    def is_echo(self) -> bool:
        """True if another rank has said the same before, and ended a group with that."""
        return self.report is not None and "aborted by rank " in self.report.summary

    @property
    def happened(self) -> float:
        """The best guess of when it really happened."""
        return self.time - (_NOTICED_LATE_SECONDS if self.report is None else 0.0)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others; ``failures`` must not be empty.

    Example:
        >>> root_cause([Failure(rank=1, time=2.0, code=1), Failure(rank=0, time=1.0, code=-9)]).rank
        0
    """
    return min(failures, key=lambda f: (f.is_consequence, f.is_echo, f.happened, f.rank))


def settle_time(failures: Sequence[Failure]) -> float:
    """``time.monotonic()`` from which on no further failure needs to be waited for."""
    first = min(failure.time for failure in failures)
    only_consequences = all(failure.is_consequence for failure in failures)
    return first + (PATIENCE_SECONDS if only_consequences else SETTLE_SECONDS)
