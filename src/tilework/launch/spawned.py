"""The first lines of a rank that runs in a fresh interpreter."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Final, NoReturn, cast

from tilework.launch.packing import Packed, pack
from tilework.launch.program import Program
from tilework.launch.rank import RankPlan, enter, run_interruptibly

#: The fresh interpreter's program, given with ``-c``. All ranks share the file of the payload,
#: hence ``pread``. The path comes first since loading anything else may need it.
BOOT: Final = (
    "import os,pickle,sys;"
    "fd,rank,report=map(int,sys.argv[1:]);"
    "path,rest=pickle.loads(os.pread(fd,os.fstat(fd).st_size,0));"
    "os.close(fd);sys.path[:]=path;"
    "from tilework.launch.spawned import main;main(rest,rank,report)"
)


@dataclass(frozen=True)
class PackedProgram:
    """A pickled program. The rank loads it when it runs, so that the rank can report a failure."""

    packed: Packed

    def run(self, rank: int) -> None:
        """Load the program and run it. Raises whatever the program raises."""
        cast(Program, self.packed.load()).run(rank)


def payload(plan: RankPlan, program: Program) -> bytes:
    """The bytes that :func:`main` of each rank of a launch reads; equal for all ranks.

    The rank's number and the pipe for failures are arguments instead.

    Raises:
        TypeError: The function or its arguments cannot be pickled.
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
    plan = RankPlan(
        rank=rank,
        environment=dict(os.environ),  # given by the launcher when this process was started
        report_fd=report_fd,
        launcher=plan.launcher,
        dies_with_launcher=plan.dies_with_launcher,
        threads=plan.threads,
    )
    enter(plan)
    # Also delivers a Ctrl-C that was held back while nothing could handle it.
    code = run_interruptibly(cast(Program, packed), plan)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would show a trace
    sys.exit(code)
