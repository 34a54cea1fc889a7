"""A rank's process: set it up, run the program, report its failure, end.

A forked rank ends without the interpreter's own finalisation: it shares torch's memory with
its siblings, and taking torch apart object by object would copy all of it (seconds for four
ranks, measured). What programs rely on at exit is done by hand: threads are joined, exit
handlers run, open files are closed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from tilework.comm.flight import watch
from tilework.launch import linux
from tilework.launch.failure_report import describe, encode, summary
from tilework.launch.program import Program
from tilework.launch.sweep import MARK_VARIABLE, map_mark

#: What a launcher handles itself and a rank must not inherit.
HANDLED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGWINCH", "SIGUSR1")
    if hasattr(signal, name)
)


@dataclass(frozen=True)
class RankPlan:
    """The plan of a rank's process: its rank, environment and descriptors."""

    rank: int
    environment: dict[str, str]
    """All of it, not only the additions."""
    report_fd: int
    """Write end of the pipe for the failure report."""
    launcher: int
    """Process id of the launcher."""
    dies_with_launcher: bool
    """True to have the kernel kill this process when the launcher's thread ends."""
    threads: int | None
    """torch's threads; None where the user has chosen."""


def enter(plan: RankPlan) -> None:
    """Make this process rank ``plan.rank``: its environment, its signals, its parent's death."""
    if plan.dies_with_launcher:
        linux.die_with_parent(plan.launcher)
    os.environ.clear()
    os.environ.update(plan.environment)
    if MARK_VARIABLE in os.environ:
        map_mark(os.environ[MARK_VARIABLE])
    os.set_inheritable(plan.report_fd, False)
    # An own file, so that a trace is whole however many ranks crash at once.
    faulthandler.enable(plan.report_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # whole lines, and at once, as on a terminal
    torch = sys.modules.get("torch")
    if torch is not None and plan.threads is not None:
        torch.set_num_threads(plan.threads)


def reset_signals() -> None:
    """Python's own handlers, except for what was ignored already (``nohup``); and SIGUSR1."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(
                number,
                signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
            )
    watch.arm()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def forget_exit_handlers() -> None:
    """Drop the exit handlers that this process inherited: they belong to its parent."""
    atexit._clear()


def resume_gc() -> None:
    """Collect garbage again, of what is made from now on (see :func:`frozen_heap`)."""
    gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """While forking: keep the collector from writing to, and so copying, what ranks share."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_interruptibly(program: Program, plan: RankPlan) -> int:
    """:func:`run_program` with signals as the program expects them; Ctrl-C never shows a trace."""
    try:
        reset_signals()
        return run_program(program, plan)
    except KeyboardInterrupt:  # in the moment before the program ran, or after it had failed
        return 128 + signal.SIGINT


def run_program(program: Program, plan: RankPlan) -> int:
    """Run ``program``, report how it fails if it does, and return the exit status."""
    me = os.getpid()
    try:
        program.run(plan.rank)
    except BaseException as error:
        code = _exit_code(error)
        # A child that the program forked may come by here too: it is no rank.
        if os.getpid() != me:
            _call_hook(error)
            _flush()
            os._exit(code)
        if code != 0:
            _report(error, code, plan.report_fd)
            if not isinstance(error, KeyboardInterrupt):
                how = f"exit code {code}" if isinstance(error, SystemExit) else summary(error)
                abort_groups(f"rank {plan.rank} failed: {how}")
        return code
    return 0


def end(code: int) -> NoReturn:
    """End this forked process as ``sys.exit(code)`` would, as far as a program can tell."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _leave_groups()  # its exit handler may have been the parent's, and so dropped
        _flush()
        _close_files()
    except BaseException as error:
        # Ctrl-C while waiting for a thread, as a rule; the status is known already.
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        _flush()
        os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        with contextlib.suppress(OSError, ValueError):
            print(error.code, file=sys.stderr)
        return 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _report(error: BaseException, code: int, fd: int) -> None:
    """Send the failure report; a pipe that nobody reads any more is no error."""
    data = memoryview(encode(describe(error, code)))
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
    # A hook that the program set may do more than print (post a message, say).
    if _hook() is not sys.__excepthook__:
        _call_hook(error)


def abort_groups(reason: str) -> None:
    """Tell peers at once, with the reason, instead of when exit handlers have run."""
    world = sys.modules.get("tilework.comm.world")  # not loaded: no groups
    if world is not None:
        with contextlib.suppress(Exception):
            world.current_world().abort(reason)


def _leave_groups() -> None:
    world = sys.modules.get("tilework.comm.world")
    if world is not None:
        world.end_process()


def _call_hook(error: BaseException) -> None:
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        with contextlib.suppress(Exception):
            _hook()(type(error), error, error.__traceback__)


def _hook() -> Callable[..., object]:
    """The program's hook for what it does not catch; not torch.distributed's around it.

    That prints the traceback of each rank with the rank in front, as the launcher does for all.
    """
    hook = sys.excepthook
    if str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
        cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        inner = [cell.cell_contents for name, cell in cells if name == "old_hook"]
        return inner[0] if inner else sys.__excepthook__
    return hook


def _close_files() -> None:
    """Close files that the program left open, as the interpreter's end would.

    Only objects made since the fork are looked at: what the launcher had is frozen.
    """
    own = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    gc.collect()
    files = [o for o in gc.get_objects() if isinstance(o, io.IOBase) and id(o) not in own]
    # Outermost first: a text layer or a compressor still writes to what lies below it.
    for file in sorted(files, key=_depth):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                file.close()


def _depth(file: io.IOBase) -> int:
    """0 for layers over files, 1 for buffers, 2 for raw files."""
    if isinstance(file, io.RawIOBase):
        return 2
    return 1 if isinstance(file, io.BufferedIOBase) and hasattr(file, "raw") else 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
