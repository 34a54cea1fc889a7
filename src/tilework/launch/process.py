"""A rank's process as the launcher sees it: alive, or ended."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

from tilework.launch import rank as inside
from tilework.launch.failure_report import MAX_TRACEBACK_CHARS, FailureReport, decode
from tilework.launch.program import Program
from tilework.launch.rank import BOOT, RankPlan, payload

#: The size of a report: JSON may need six bytes for a character.
_MAX_REPORT_BYTES: Final = 6 * MAX_TRACEBACK_CHARS + (64 << 10)


@dataclass(frozen=True)
class Ending:
    """The end of a process: when the launcher noticed it, and the exit code."""

    time: float
    """``time.monotonic()`` when the launcher noticed."""
    code: int
    """Exit code, or minus the signal's number."""


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
        if self._words is None and self._report:
            self._words = decode(bytes(self._report))[0]
        return self._words

    @property
    def crash_trace(self) -> str:
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
        self.forget_in_child()

    def forget_in_child(self) -> None:
        """Close the descriptors, of which a forked child has copies."""
        self._close_report()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

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


# Either way the rank leads a process group and has no controlling terminal: Ctrl-C reaches only the
# launcher, and everything that the rank starts can be signalled as one group. The rank leads a
# session only where there is a terminal to be rid of: Linux may share cores between sessions before
# it shares them between processes (sched_autogroup), and then a rank could not yield to another.


@dataclass(frozen=True)
class Standard:
    """The descriptors for a rank's standard streams; None: the launcher's own."""

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None

    def pairs(self) -> list[tuple[int, int]]:
        sources = (self.stdin, self.stdout, self.stderr)
        return [(fd, target) for target, fd in enumerate(sources) if fd is not None]


class ForkStarter:
    """Starts ranks by forking this process; close it when all have been started.

    With ``whole_process`` the program replaces this process's own (``tilework run``): the process's
    exit handlers, also those of libraries imported before the fork, then belong to the rank. A
    larger program, of which ranks run a function, keeps its exit handlers.
    """

    def __init__(self, program: Program, whole_process: bool) -> None:
        self._program = program
        self._whole_process = whole_process
        self._heap = contextlib.ExitStack()
        self._heap.enter_context(inside.frozen_heap())

    def start(self, plan: RankPlan, standard: Standard, drop: Callable[[], None]) -> int:
        """Start ``plan.rank``; return the process id.

        The child calls ``drop``, which closes the launcher's descriptors.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # there may be no such stream
                stream.flush()  # or the child would write it a second time
        with signals_blocked():
            pid = _fork()
            if pid == 0:
                self._live(plan, standard, drop)
        return pid

    def close(self) -> None:
        """Let the garbage collector see this process's objects again. Idempotent."""
        self._heap.close()

    def _live(self, plan: RankPlan, standard: Standard, drop: Callable[[], None]) -> NoReturn:
        """Run the program in the forked child and exit; never return into the launcher's frames."""
        code = 1
        try:
            if has_terminal():
                os.setsid()
            else:
                os.setpgid(0, 0)
            for source, target in standard.pairs():
                os.dup2(source, target)
            drop()
            if not self._whole_process:
                atexit._clear()  # they belong to the parent
            inside.enter(plan)
            gc.enable()  # among new objects only: see frozen_heap
            code = inside.run_interruptibly(self._program, plan)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                sys.excepthook(type(error), error, error.__traceback__)
        finally:
            inside.end(code)


class FreshStarter:
    """Starts ranks as fresh interpreters. Owns a file that all ranks read; close it afterwards.

    ``plan`` is of any rank. Raises TypeError if the program cannot be pickled.
    """

    def __init__(self, plan: RankPlan, program: Program) -> None:
        data = payload(plan, program)
        # Unlinked from the start: nothing to clean up, and no limit as with pipes or arguments.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def start(self, plan: RankPlan, standard: Standard, drop: Callable[[], None]) -> int:
        """Start an interpreter and return its process id; ``drop`` is not called."""
        own = [self._file.fileno(), plan.report_fd]
        # Numbers that clash with no descriptor that this process opens meanwhile or passes on.
        free = max([*own, *(fd for fd, _ in standard.pairs())]) + 1
        targets = [free, free + 1]
        moves = [*standard.pairs(), *zip(own, targets, strict=True)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = [sys.executable, *flags, "-c", BOOT]
        return os.posix_spawn(
            sys.executable,
            [*arguments, str(targets[0]), str(plan.rank), str(targets[1])],
            plan.environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in moves],
            **({"setsid": True} if has_terminal() else {"setpgroup": 0}),
            # Held back until the rank can end quietly, without a traceback from the import.
            setsigmask=[signal.SIGINT],
            # Ignored by Python; a fresh interpreter decides for itself.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )

    def close(self) -> None:
        self._file.close()


Starter = ForkStarter | FreshStarter


def has_terminal() -> bool:
    """True if this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any other thread, even a numerical library's, which knows
        # how to fork; and a warning that is an error would be raised when the child exists.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Hold back the signals that a launcher handles, until the block ends.

    A child that is forked in the block resets the handlers before it gets a signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, inside.HANDLED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
