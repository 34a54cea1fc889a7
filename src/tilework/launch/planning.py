"""``tilework plan`` and ``tilework run --pretend``: a program's ranks are pretended."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path

from tilework.errors import PretendError
from tilework.launch.failure_report import hint
from tilework.launch.program import Program
from tilework.plan import Cluster, pretend


def plan_program(
    program: Program,
    ranks: int,
    hosts: int,
    memory: str | None,
    cluster: Path | None,
    everyone: bool,
) -> int:
    """Print the report on a program; return 0, or 1 if a rank parts, fails or lacks memory.

    ``everyone``: run each rank, not each kind. Raises ValueError if the settings contradict each
    other, or a file is no cluster.
    """
    machines = None if cluster is None else Cluster.read(cluster)
    with pretend(ranks, hosts, memory, machines) as job:
        try:
            report = job.run(_run, program, everyone=everyone, is_script=True)
        except PretendError as error:
            print(f"tilework plan: {error}", file=sys.stderr)
            return 1
        except Exception as error:
            traceback.print_exc()
            if advice := hint(error):
                print(advice, file=sys.stderr)
            return 1
    report.__rich__().print()
    return 0 if report.is_good else 1


def _run(program: Program) -> None:
    rank = int(os.environ["RANK"])
    path, arguments, main = list(sys.path), sys.argv, sys.modules["__main__"]
    try:
        # Only the first rank prints.
        with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
            program.run(rank)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"rank {rank} ended with status {end.code}") from end
    finally:
        sys.path[:], sys.argv, sys.modules["__main__"] = path, arguments, main
