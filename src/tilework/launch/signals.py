"""Signals sent to the launcher, as bytes in a pipe that its loop waits on."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import Final

from tilework.launch.rank import HANDLED_SIGNALS

#: Seconds from the first signal to SIGKILL. With the time that finding the cause takes
#: (failure_report.PATIENCE_SECONDS) everything has ended well within 3 s.
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
    """The steps after a user's signal: SIGINT after Ctrl-C, else SIGTERM; SIGTERM; SIGKILL after
    ``grace`` seconds.

    SIGINT lets ranks run ``finally`` blocks.
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


#: The signals that end the job.
ENDING_SIGNALS: Final = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)


def die_quietly() -> None:
    """Make Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end this process silently, without a clean-up."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    _install(dict.fromkeys(ENDING_SIGNALS, leave))


class SignalInbox:
    """Collects signals instead of letting them interrupt; a context manager, main thread only.

    Signals that were ignored before (``nohup``) stay ignored.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, object] = {}
        #: True once a signal has come that ends a job.
        self.ends_job = False

    def __enter__(self) -> SignalInbox:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = _install(dict.fromkeys(HANDLED_SIGNALS, _nothing))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(-1)
        self.read()
        self.forget_in_child()

    def fileno(self) -> int:
        """A descriptor that is readable when a signal has come."""
        return self._reader

    def read(self) -> list[int]:
        """The signals since the last call, in order."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            numbers += os.read(self._reader, 4096)
        self.ends_job = self.ends_job or not ENDING_SIGNALS.isdisjoint(numbers)
        return numbers

    def forget_in_child(self) -> None:
        """Close the pipe; for a forked child, and at the end."""
        for fd in (self._reader, self._writer):
            os.close(fd)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up pipe already has the signal."""


def _install(handlers: dict[int, object]) -> dict[int, object]:
    """Install handlers for signals that are not ignored; return the handlers that these replace."""
    before: dict[int, object] = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)  # type: ignore[arg-type]
    return before
