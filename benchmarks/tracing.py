"""What tracing costs: steps with 1,000 operations a second, traced and not, by turns.

    python benchmarks/tracing.py                # 2 ranks that are processes: half a minute
    python benchmarks/tracing.py --kind threads

A step computes, and calls ten collectives, for some 10 ms. A turn is some steps; the same processes
run turns of both kinds, one after the other. Printed are the wall-clock time of the best turn of
each kind, and the median of the processes' own CPU time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist
from tilework.inspect import read_timeline, trace
from tilework.testing import run_ranks

STEPS, CALLS, TURNS = 40, 10, 8
_LIMIT = timedelta(minutes=10)
#: Times of turns: wall clock and CPU, in seconds.
Times = list[tuple[float, float]]


def step(a: torch.Tensor, x: torch.Tensor) -> None:
    """About 10 ms on one core, with ten collectives."""
    with dist.span("step"):
        for _ in range(CALLS):
            end = time.thread_time() + 0.9e-3
            while time.thread_time() < end:
                a @ a
            dist.all_reduce(x)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """The seconds of some steps: wall clock and CPU."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu


def program(rank: int, folder: str) -> dict[str, Times]:
    torch.set_num_threads(1)
    a, x = torch.randn(48, 48), torch.ones(1000)
    found: dict[str, Times] = {"off": [], "traced": []}

    def steps() -> None:
        for _ in range(STEPS):
            step(a, x)

    steps()
    for _ in range(TURNS):
        found["off"].append(timed(steps))
        with trace(folder):
            found["traced"].append(timed(steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("processes", "threads"), default="processes")
    parser.add_argument("--ranks", type=int, default=2)
    add_plot_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(options.ranks, program, folder, kind=options.kind, timeout=_LIMIT)
        seen = sum(len(each.operations) for each in read_timeline(folder).ranks)
    best, cpu = {}, {}
    for mode in found[0]:
        best[mode] = max(min(wall for wall, _ in each[mode]) for each in found)
        cpu[mode] = max(statistics.median(own for _, own in each[mode]) for each in found)
    rate = STEPS * CALLS / best["off"]
    print(f"{rate:,.0f} operations a second and rank; {seen:,} seen in the last turn")
    table = Table(title="Milliseconds of a step")
    for head in ("", "off", "traced", "more"):
        table.add_column(head, justify="right" if head else "left")
    for name, times in (("wall clock, best turn", best), ("CPU time, median turn", cpu)):
        ms = {mode: 1000 * seconds / STEPS for mode, seconds in times.items()}
        more = ms["traced"] / ms["off"] - 1
        table.add_row(name, f"{ms['off']:.3f}", f"{ms['traced']:.3f}", f"{more:+.1%}")
    Console().print(table)
    draw(options.plot, chart(table, ["off", "traced"]))


if __name__ == "__main__":
    main()
