"""Ranks that are threads: a small all_reduce, and making a group, with the core and without it.

    python benchmarks/threads.py                 # 2, 4 and 64 ranks, less than a minute
    python benchmarks/threads.py --ranks 512 --rounds 3
    python benchmarks/threads.py --json out.json

Without the core, ranks meet in Python, under the interpreter's lock. Both run by turns, so that
only the ratios mean much. An all_reduce's time is that of a run of calls on the slowest rank; of
the rounds the table has the shortest and the median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist
from tilework.comm.backends.threads import threads_backend
from tilework.testing import run_ranks

#: Groups that each rank makes in a round, calls of all ranks together, and the least of a rank.
GROUPS, CALLS, LEAST = 3, 1600, 5
#: By engine: for each round the microseconds of an all_reduce, and of making a group.
Times = dict[str, list[tuple[float, float]]]


def program(rank: int, calls: int) -> tuple[float, float]:
    """Microseconds of an all_reduce, and of making a group."""
    value = torch.zeros(2)
    for _ in range(LEAST):
        dist.all_reduce(value)
    begun = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(value)
    between = time.perf_counter()
    for _ in range(GROUPS):
        dist.new_group(list(range(dist.get_world_size())))
    return (between - begun) / calls * 1e6, (time.perf_counter() - between) / GROUPS * 1e6


def measure(ranks: int, rounds: int) -> Times:
    """The times of the slowest rank, with the core and without it by turns."""
    times: Times = {"core": [], "Python": []}
    calls = max(LEAST, CALLS // ranks)
    for _ in range(rounds):
        for name, found in times.items():
            without = patch.object(threads_backend, "_core", None)
            with without if name == "Python" else nullcontext():
                call, group = zip(*run_ranks(ranks, program, calls), strict=True)
            found.append((max(call), max(group)))
    return times


def show(found: dict[int, Times]) -> Table:
    """Shortest and median times, and how many times as long it takes without the core."""
    table = Table(title=f"Microseconds, ranks as threads, {os.cpu_count()} cores")
    for head in ("", "ranks", "core", "Python", "median core", "median Python", "ratio"):
        table.add_column(head, justify="right" if head else "left")
    for column, what in enumerate(("all_reduce of 8 B", "new_group")):
        for ranks, times in found.items():
            core, python = ([each[column] for each in of] for of in times.values())
            middle = statistics.median(core), statistics.median(python)
            figures = [min(core), min(python), *middle]
            texts = [f"{figure:,.1f}" for figure in figures]
            table.add_row(what, str(ranks), *texts, f"{middle[1] / middle[0]:.1f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {ranks: measure(ranks, options.rounds) for ranks in options.ranks}
    table = show(found)
    Console().print(table)
    draw(options.plot, chart(table, ["core", "Python"], labels=2))
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "times": found}, indent=1))


if __name__ == "__main__":
    main()
