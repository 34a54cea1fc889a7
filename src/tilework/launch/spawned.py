"""The first lines of a rank that runs in a fresh interpreter."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

from tilework.launch.notebook import main_is_typed
from tilework.launch.program import Program
from tilework.launch.rank import RankPlan, enter, run_interruptibly

#: What the fresh interpreter is given with ``-c``. The payload is a file that all ranks share,
#: hence ``pread``; the path comes first since loading anything else may need it.
BOOT: Final = (
    "import os,pickle,sys;"
    "fd,rank,report=map(int,sys.argv[1:]);"
    "path,rest=pickle.loads(os.pread(fd,os.fstat(fd).st_size,0));"
    "os.close(fd);sys.path[:]=path;"
    "from tilework.launch.spawned import main;main(rest,rank,report)"
)


@dataclass(frozen=True)
class Pickled:
    """A program that is loaded only when it runs, so that failing to load it is reported."""

    program: bytes
    main: dict[str, Any]
    """The way a fresh process gets the ``__main__`` that functions may have been defined in."""

    def run(self, rank: int) -> None:
        """Load the program and run it. Raises whatever that raises."""
        if self.main:
            _recreate_main(self.main)
        cast(Program, pickle.loads(self.program)).run(rank)


def payload(plan: RankPlan, program: Program) -> bytes:
    """The data that all ranks of a launch share, for :func:`main`; rank and pipe come as arguments.

    Raises:
        TypeError: The function or its arguments cannot be pickled.
    """
    try:
        data = _dumps(program)
        # What is defined in this program's main module is pickled by that name.
        by_name = b"__main__" in data and not main_is_typed()
        packed = Pickled(data, _how_to_recreate_main() if by_name else {})
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a function for fresh interpreters, and its arguments, must be picklable: {error}. "
            f'Define it at the top level of a module, or use start="fork"'
        ) from error
    return pickle.dumps((sys.path, pickle.dumps((plan, packed))))


def _dumps(program: Program) -> bytes:
    """The program, pickled; with the code of what was typed in, which has no module to import."""
    if not main_is_typed():
        return pickle.dumps(program)
    import cloudpickle  # type: ignore[import-untyped]

    return cast(bytes, cloudpickle.dumps(program))


def main(rest: bytes, rank: int, report_fd: int) -> NoReturn:
    """Become ``rank`` and run the program; exits as the interpreter does."""
    plan, packed = cast(tuple[RankPlan, Pickled], pickle.loads(rest))
    plan = RankPlan(
        rank=rank,
        environment=dict(os.environ),  # given by the launcher when this process was started
        report_fd=report_fd,
        launcher=plan.launcher,
        dies_with_launcher=plan.dies_with_launcher,
        threads=plan.threads,
    )
    enter(plan)
    # Also lets a Ctrl-C in that was held back while nothing could handle it.
    code = run_interruptibly(cast(Program, packed), plan)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would show a trace
    sys.exit(code)


def is_recreating_main() -> bool:
    """True if this process is a rank that is just loading the main module of its program."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _how_to_recreate_main() -> dict[str, Any]:
    """Multiprocessing's data for a fresh process to get this one's ``__main__``."""
    known = multiprocessing.spawn.get_preparation_data("rank")
    wanted = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    return {name: value for name, value in known.items() if name in wanted}


def _recreate_main(how: dict[str, Any]) -> None:
    """Load the main module, marked as multiprocessing does it, so that neither starts ranks."""
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.prepare(how)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
