"""Start one rank's process: by a fork of this one, or as a fresh interpreter.

Either way the rank leads a process group and has no controlling terminal: Ctrl-C reaches only the
launcher, and everything that the rank starts can be signalled as one group. The rank leads a
session only where there is a terminal to be rid of: Linux may share cores between sessions before
it shares them between processes (sched_autogroup), and then a rank could not yield to another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from tilework.launch import rank as inside
from tilework.launch.program import Program
from tilework.launch.rank import BOOT, RankPlan, payload


@dataclass(frozen=True)
class Standard:
    """The descriptors for a rank's standard streams; None: the launcher's own.

    Attributes:
        stdin: Standard input.
        stdout: Standard output.
        stderr: Standard error.
    """

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None

    def pairs(self) -> list[tuple[int, int]]:
        """(descriptor, 0 to 2) for each standard stream that is not the launcher's own."""
        sources = (self.stdin, self.stdout, self.stderr)
        return [(fd, target) for target, fd in enumerate(sources) if fd is not None]


class Starter(Protocol):
    """Starts ranks of one program; close it when all have been started."""

    def start(self, plan: RankPlan, standard: Standard, drop: Callable[[], None]) -> int:
        """Start ``plan.rank``; return its process id.

        Args:
            plan: The plan of the rank's process.
            standard: The rank's standard descriptors.
            drop: Closes the launcher's descriptors; a forked child calls it.
        """
        ...

    def close(self) -> None:
        """Release the resources for starting. Idempotent."""
        ...


class ForkStarter:
    """Starts ranks by forking this process.

    Args:
        program: The program to run.
        whole_process: True if the program replaces this process's own (``tilework run``): the
            process's exit handlers, also those of libraries imported before the fork, then belong
            to the rank. False for a function called from a larger program, which keeps its exit
            handlers.
    """

    def __init__(self, program: Program, whole_process: bool) -> None:
        self._program = program
        self._whole_process = whole_process
        self._heap = contextlib.ExitStack()
        self._heap.enter_context(inside.frozen_heap())

    def start(self, plan: RankPlan, standard: Standard, drop: Callable[[], None]) -> int:
        """Fork, run the program in the child, and return the child's process id."""
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
                inside.forget_exit_handlers()
            inside.enter(plan)
            inside.resume_gc()
            code = inside.run_interruptibly(self._program, plan)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                sys.excepthook(type(error), error, error.__traceback__)
        finally:
            inside.end(code)


class FreshStarter:
    """Starts ranks as fresh interpreters. Owns a file that all ranks read; close it afterwards.

    Args:
        plan: The plan of any rank; the differences between ranks are given to :meth:`start`.
        program: The program to run. Raises TypeError if it cannot be pickled.
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
        """Close the file that ranks read. Idempotent."""
        self._file.close()


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
