"""The steps that end ranks: ask, ask again, then kill, all within three seconds. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

#: Seconds from the first signal to SIGKILL. With the time that finding the cause takes
#: (root_cause.PATIENCE_SECONDS) everything has ended well within 3 s.
KILL_SECONDS: Final = 2.0


@dataclass(frozen=True)
class TerminationStep:
    """A signal to the ranks of a job, and the time to send it."""

    after: float
    """Seconds since the stop began."""
    signal: int
    """The number of the signal."""
    spare_failed: bool = False
    """True to leave alone ranks that have failed and are cleaning up."""


def after_failure() -> list[TerminationStep]:
    """The steps after a failure: the failed rank has a second to finish exit handlers."""
    return [
        TerminationStep(0.0, signal.SIGTERM, spare_failed=True),
        TerminationStep(KILL_SECONDS / 2, signal.SIGTERM),
        TerminationStep(KILL_SECONDS, signal.SIGKILL),
    ]


def after_signal(number: int, grace: float = KILL_SECONDS) -> list[TerminationStep]:
    """The steps after a user's signal: SIGINT after Ctrl-C, else SIGTERM; SIGTERM; SIGKILL.

    SIGINT lets ranks run ``finally`` blocks.

    Args:
        number: The signal that the user sent to the launcher.
        grace: Seconds until ranks are killed.
    """
    first = number if number == signal.SIGINT else signal.SIGTERM
    return [
        TerminationStep(0.0, first),
        TerminationStep(grace / 2, signal.SIGTERM),
        TerminationStep(grace, signal.SIGKILL),
    ]


def at_once() -> list[TerminationStep]:
    """The only step of an end at once: SIGKILL to all ranks."""
    return [TerminationStep(0.0, signal.SIGKILL)]
