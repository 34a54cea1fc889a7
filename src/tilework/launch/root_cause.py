"""The root cause among ranks' failures, not its consequences. Pure; no processes here.

When a rank dies, its peers fail a moment later because they miss it, and the launcher may hear of
them first. Therefore failures are collected for a moment. A failure that does not look like the
consequence of another is preferred; among equals, the earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tilework.launch.failure_report import FailureReport

#: Seconds to collect failures after a failure that looks like a cause.
SETTLE_SECONDS: Final = 0.1
#: Seconds to wait for a cause when only consequences have been seen.
PATIENCE_SECONDS: Final = 0.5

#: A death by signal is noticed late; a report carries the exact time of the failure.
_NOTICED_LATE_SECONDS: Final = 0.1

#: Classes that say "another rank is at fault", or probably follow from such a fault.
_CONSEQUENCES: Final = re.compile(
    r"tilework\.errors\.(PeerLostError|DistNetworkError|DistStoreError|CollectiveTimeoutError)"
    r"|builtins\.ConnectionError"
    r"|torch\.distributed\.Dist(Backend|Network|Store)Error"
)
#: torch's Gloo says so in plain RuntimeErrors.
_CONSEQUENCE_TEXTS: Final = re.compile(r"gloo/transport|Connection closed by peer")


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank by itself, not because the launcher ended it."""

    rank: int
    """The global rank."""
    time: float
    """``time.monotonic()`` at the failure, or when it was noticed."""
    code: int
    """Exit code, or minus the number of the signal that ended or stopped the rank."""
    report: FailureReport | None = None
    """The rank's report; None after a signal or ``os._exit``."""
    crash_trace: str = ""
    """faulthandler's trace of a crash in native code."""
    node: str = ""
    """The node of the rank in words, if it is another node, which prints the traceback there."""
    lost_node: str = ""
    """The ranks in words, if their whole node is gone; ``rank`` is the first of them."""

    @property
    def exit_status(self) -> int:
        """The exit status as a shell shows it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def signal(self) -> int | None:
        """The signal that ended or stopped the rank; None if it exited."""
        return -self.code if self.code < 0 else None

    @property
    def traceback(self) -> str:
        """The traceback, or the trace of the crash; empty if the rank left neither."""
        return self.report.traceback if self.report and self.report.traceback else self.crash_trace

    @property
    def is_consequence(self) -> bool:
        """True if this may be a consequence of another rank's failure."""
        if self.report is None:
            return self.signal == signal.SIGABRT  # native code aborts when a peer is gone
        return any(map(_CONSEQUENCES.fullmatch, self.report.classes)) or bool(
            _CONSEQUENCE_TEXTS.search(self.report.summary)
        )

    @property
    def is_echo(self) -> bool:
        """True if the message only repeats the error with which another rank aborted a group."""
        return self.report is not None and "aborted by rank " in self.report.summary

    @property
    def happened(self) -> float:
        """The best guess of the real time of the failure."""
        return self.time - (_NOTICED_LATE_SECONDS if self.report is None else 0.0)


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that caused the others; ``failures`` must not be empty.

    Example:
        >>> last = RankFailure(rank=1, time=2.0, code=1)
        >>> root_cause([last, RankFailure(rank=0, time=1.0, code=-9)]).rank
        0
    """
    return min(failures, key=lambda f: (f.is_consequence, f.is_echo, f.happened, f.rank))


def settle_time(failures: Sequence[RankFailure]) -> float:
    """``time.monotonic()`` after which there is no need to wait for further failures."""
    first = min(failure.time for failure in failures)
    only_consequences = all(failure.is_consequence for failure in failures)
    return first + (PATIENCE_SECONDS if only_consequences else SETTLE_SECONDS)
