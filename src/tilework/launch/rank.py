"""A rank's process: set up, run the program, report a failure, end.

A forked rank ends without the interpreter's finalisation. It shares torch's memory with its
siblings, and taking torch apart object by object would copy all of it (seconds for four ranks,
measured). The steps that programs rely on at exit are done by hand: join threads, run exit
handlers, close open files.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NoReturn, cast

from tilework.comm.launching import TRACE_VARIABLE, WATCH_VARIABLE
from tilework.comm.launching import arm as arm_flight_records
from tilework.launch import linux
from tilework.launch.failure_report import describe, encode, summary
from tilework.launch.program import Packed, Program, pack
from tilework.launch.sweep import MARK_VARIABLE, map_mark

#: The signals that a launcher handles and a rank must not inherit.
HANDLED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGWINCH", "SIGUSR1")
    if hasattr(signal, name)
)


@dataclass(frozen=True)
class RankPlan:
    """The plan of a rank's process: rank, environment and descriptors."""

    rank: int
    """The global rank."""
    environment: dict[str, str]
    """The whole environment, not only the additions."""
    report_fd: int
    """The write end of the pipe for the failure report; -1 before the pipe is made."""
    launcher: int
    """The process id of the launcher."""
    dies_with_launcher: bool
    """True to make the kernel kill this process when the launcher's thread ends."""
    threads: int | None
    """The number of torch's threads; None where the user has chosen."""


def enter(plan: RankPlan) -> None:
    """Make this process rank ``plan.rank``: environment, signals, and death of the parent."""
    if plan.dies_with_launcher:
        linux.die_with_parent(plan.launcher)
    os.environ.clear()
    os.environ.update(plan.environment)
    if MARK_VARIABLE in os.environ:
        map_mark(os.environ[MARK_VARIABLE])
    os.set_inheritable(plan.report_fd, False)
    # A separate file for each rank, so that traces of simultaneous crashes do not mix.
    faulthandler.enable(plan.report_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # whole lines, and at once, as on a terminal
    torch = sys.modules.get("torch")
    if torch is not None and plan.threads is not None:
        torch.set_num_threads(plan.threads)


def reset_signals() -> None:
    """Restore Python's handlers of signals; ignored signals (``nohup``) stay ignored.

    Afterwards SIGUSR1 makes this rank write flight records, if a folder for them is set.
    """
    signal.set_wakeup_fd(-1)
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    arm_flight_records()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Stop garbage collection in the block: it would write to memory that forks share.

    Memory that is written to would be copied. Objects that exist already are exempt.
    """
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
    """:func:`run_program_of_rank` with the signals that programs expect; Ctrl-C shows no trace."""
    try:
        reset_signals()
        return run_program_of_rank(program, plan)
    except KeyboardInterrupt:  # just before the program ran, or after it had failed
        return 128 + signal.SIGINT


def run_program_of_rank(program: Program, plan: RankPlan) -> int:
    """Run ``program``, report how it fails if it does, and return the exit status."""
    me = os.getpid()
    try:
        with _traced():
            if WATCH_VARIABLE in os.environ:
                from tilework.inspect import count_steps

                count_steps()
            program.run(plan.rank)
    except BaseException as error:
        code = _exit_code(error)
        # A child that the program forked may arrive here, too: it is not a rank.
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


def _traced() -> contextlib.AbstractContextManager[object]:
    folder = os.environ.get(TRACE_VARIABLE)
    if not folder:
        return contextlib.nullcontext()
    from tilework.inspect import trace

    return trace(folder)


def end(code: int) -> NoReturn:
    """End this forked process as ``sys.exit(code)`` would, as far as a program can see."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _leave_groups()  # the exit handler may have been the parent's, and dropped
        _flush()
        _close_files()
    except BaseException as error:
        # Usually Ctrl-C while waiting for a thread; the status is known already.
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
    data = memoryview(encode(describe(error, code)))
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
    # A hook of the program may do more than print (for example, post a message).
    if _hook() is not sys.__excepthook__:
        _call_hook(error)


def abort_groups(reason: str) -> None:
    """Abort this rank's groups: peers learn the reason at once, before exit handlers run."""
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
    hook = sys.excepthook
    if str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
        cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        inner = [cell.cell_contents for name, cell in cells if name == "old_hook"]
        return inner[0] if inner else sys.__excepthook__
    return hook


def _close_files() -> None:
    """Close files that the program left open since the fork, as the interpreter would."""
    own = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    gc.collect()
    files = [o for o in gc.get_objects() if isinstance(o, io.IOBase) and id(o) not in own]
    # Outermost first: a text layer or a compressor still writes to the layer below.
    for file in sorted(files, key=_depth):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                file.close()


def _depth(file: io.IOBase) -> int:
    """The order of closing: 0 for layers over files, 1 for buffers, 2 for raw files."""
    if isinstance(file, io.RawIOBase):
        return 2
    return 1 if isinstance(file, io.BufferedIOBase) and hasattr(file, "raw") else 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


#: The fresh interpreter's program, given with ``-c``. All ranks share the file of the payload,
#: hence ``pread``. The path comes first since loading anything else may need it.
BOOT: Final = (
    "import os,pickle,sys;"
    "fd,rank,report=map(int,sys.argv[1:]);"
    "path,rest=pickle.loads(os.pread(fd,os.fstat(fd).st_size,0));"
    "os.close(fd);sys.path[:]=path;"
    "from tilework.launch.rank import main;main(rest,rank,report)"
)


@dataclass(frozen=True)
class PackedProgram:
    """A pickled program. The rank loads it when it runs, so that the rank can report a failure."""

    packed: Packed

    def run(self, rank: int) -> None:
        cast(Program, self.packed.load()).run(rank)


def payload(plan: RankPlan, program: Program) -> bytes:
    """The bytes that :func:`main` of each rank of a launch reads; equal for all ranks.

    The rank's number and the pipe for failures are arguments instead. Raises TypeError if the
    function or its arguments cannot be pickled.
    """
    try:
        packed = pack(program)
    except TypeError as error:
        raise TypeError(
            f'{error}. Define the function at the top level of a module, or use start="fork"'
        ) from error
    return pickle.dumps((sys.path, pickle.dumps((plan, PackedProgram(packed)))))


def main(rest: bytes, rank: int, report_fd: int) -> NoReturn:
    """Make this process ``rank``, run the program, and exit as the interpreter does."""
    plan, packed = cast(tuple[RankPlan, PackedProgram], pickle.loads(rest))
    # The launcher gave the environment when it started this process.
    plan = replace(plan, rank=rank, environment=dict(os.environ), report_fd=report_fd)
    enter(plan)
    # Also delivers a Ctrl-C that was held back while nothing could handle it.
    code = run_interruptibly(cast(Program, packed), plan)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would show a trace
    sys.exit(code)
