"""A rank's process as the launcher sees it: alive, or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from tilework.launch.failure_report import MAX_TRACEBACK_CHARS, FailureReport, decode

#: The size of a report: JSON may need six bytes for a character.
_MAX_REPORT_BYTES: Final = 6 * MAX_TRACEBACK_CHARS + (64 << 10)


@dataclass(frozen=True)
class Ending:
    """The end of a process: when the launcher noticed it, and the exit code."""

    time: float
    """``time.monotonic()`` when the launcher noticed."""
    code: int
    """Exit code, or minus the signal's number."""

    @property
    def signal(self) -> int | None:
        """The signal that ended the process; None if it exited."""
        return -self.code if self.code < 0 else None


@dataclass(eq=False)
class RankProcess:
    """A rank's process, and the pipe for the failure report. Owned by a job.

    An ended process stays unreaped until :meth:`reap` where the system allows it: no stranger can
    get the number of the process group while somebody may still signal the group.
    """

    #: The global rank.
    rank: int
    #: The process id, which is also the number of the rank's process group.
    pid: int
    #: The read end of the pipe for the failure report; -1 once closed.
    report_fd: int
    #: Set by :meth:`check`; None: the process has not ended as far as the launcher knows.
    ending: Ending | None = None
    #: True if the launcher has asked the process to end; the end is then not a failure.
    asked_to_end: bool = False
    _report: bytearray = field(default_factory=bytearray)
    _pidfd: int = -1
    _reaped: bool = False
    _words: FailureReport | None = None

    def __post_init__(self) -> None:
        """Get a descriptor that shows when the process ends, if the system offers that."""
        os.set_blocking(self.report_fd, False)
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        """True if the process has not ended as far as the launcher knows."""
        return self.ending is None

    @property
    def report(self) -> FailureReport | None:
        """The failure report; None before it was received."""
        if self._words is None and self._report:
            self._words = decode(bytes(self._report))[0]
        return self._words

    @property
    def crash_trace(self) -> str:
        """The trace that faulthandler wrote; empty if none."""
        return decode(bytes(self._report))[1]

    @property
    def end_fd(self) -> int | None:
        """The descriptor that is readable once the process has ended; None: the launcher polls."""
        return self._pidfd if self._pidfd >= 0 else None

    def check(self) -> None:
        """Note that the process has ended, if it has. Does not block."""
        if self.ending is None:
            code = self._poll()
            if code is not None:
                self.read_report()
                self.ending = Ending(time.monotonic(), code)

    def read_report(self) -> None:
        """Read what has arrived of the failure report. Does not block."""
        with contextlib.suppress(BlockingIOError):
            while self.report_fd >= 0:
                data = os.read(self.report_fd, 1 << 16)
                if not data:
                    self._close_report()
                elif len(self._report) < _MAX_REPORT_BYTES:
                    self._report += data

    def signal(self, number: int) -> None:
        """Send a signal only to the rank's process, if it is alive."""
        if self.alive and not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and to everything in the rank's process group."""
        if self._reaped:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # the rank does not lead a group yet
            self.signal(number)
        except PermissionError:
            pass  # macOS: only an ended process is left in the group

    def reap(self) -> None:
        """Reap the ended process, which frees the process id, and close all descriptors."""
        if not self._reaped:
            self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self._close_report()
        self._close_pidfd()

    def forget_in_child(self) -> None:
        """Close the launcher's descriptors in a forked child, which is another rank."""
        self._close_report()
        self._close_pidfd()

    def _poll(self) -> int | None:
        if hasattr(os, "waitid"):
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return self._lost()
            if result is None:
                return None
            return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return self._lost()
        if pid == 0:
            return None
        # The process number is free from here on: end leftover processes now or never.
        self.signal_group(signal.SIGKILL)
        self._reaped = True
        return os.waitstatus_to_exitcode(status)

    def _lost(self) -> int:
        """The code in the report, or 0, if other code of this program has reaped the process."""
        self._reaped = True
        self.read_report()
        return self.report.exit_code if self.report is not None else 0

    def _close_report(self) -> None:
        if self.report_fd >= 0:
            os.close(self.report_fd)
            self.report_fd = -1

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
