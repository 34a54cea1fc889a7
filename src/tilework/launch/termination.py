"""The steps that end ranks: asked, asked again, then killed, all within three seconds. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

#: Seconds from the first signal to SIGKILL. With the time that finding the cause takes
#: (verdict.PATIENCE_SECONDS) everything has ended well within 3 s.
KILL_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Step:
    """Signals to send at one moment."""

    after: float
    """Seconds since the stop began."""
    signal: int
    spare_failed: bool = False
    """True if ranks that have failed, and are cleaning up by themselves, are left alone."""


def after_failure() -> list[Step]:
    """A rank failed: the others are asked to end; the failed one may finish its exit handlers."""
    return [
        Step(0.0, signal.SIGTERM, spare_failed=True),
        Step(KILL_SECONDS / 2, signal.SIGTERM),
        Step(KILL_SECONDS, signal.SIGKILL),
    ]


def after_signal(number: int, grace: float = KILL_SECONDS) -> list[Step]:
    """The user ended the job: ranks get what the launcher got, so ``finally`` blocks run.

    Args:
        number: The signal.
        grace: Seconds until they are killed.
    """
    first = number if number == signal.SIGINT else signal.SIGTERM
    return [
        Step(0.0, first),
        Step(grace / 2, signal.SIGTERM),
        Step(grace, signal.SIGKILL),
    ]


def at_once() -> list[Step]:
    """The steps for an end at once."""
    return [Step(0.0, signal.SIGKILL)]
