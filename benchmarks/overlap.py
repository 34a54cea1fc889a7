"""What asynchronous operations hide: a compute loop with and without all_reduces in flight.

    python benchmarks/overlap.py                 # a rank per core, and two; half a minute
    python benchmarks/overlap.py --ranks 2 --json out.json

Each rank multiplies matrices on one thread, and all_reduces tensors of 16 MiB. The ways to do so
take turns, so that whatever else the machine does slows all of them. A time is the median on the
slowest rank; with a late peer, on rank 0, whose all_reduce includes the wait.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist
from tilework.cores import usable_cores
from tilework.testing import run_ranks

MIB = 1 << 20
COMPUTE, REDUCE, SEQUENTIAL, OVERLAPPED = "compute", "all_reduce", "one after the other", "async"
LATE_SECONDS = 0.05
COMPUTE_SECONDS = 0.07

#: Seconds of each round, by way.
Times = dict[str, list[float]]


class Scene:
    """One rank's end of the ways to compute and to reduce.

    Args:
        count: How many tensors of 16 MiB each way reduces.
        late: Whether the last rank sleeps before it does its part.
    """

    def __init__(self, count: int, late: bool) -> None:
        self.buffers = [torch.zeros(16 * MIB // 4) for _ in range(count)]
        self.a, self.b = torch.rand(256, 256), torch.rand(256, 256)
        self.late = late and dist.get_rank() == dist.get_world_size() - 1
        self.loops = 1
        self.loops = self.calibrated()

    def calibrated(self) -> int:
        """How many products take COMPUTE_SECONDS while all ranks compute; the same everywhere."""
        taken = statistics.median(self.timed(self.compute) for _ in range(100))
        loops = torch.tensor(max(1, round(COMPUTE_SECONDS / taken)))
        dist.broadcast(loops, 0)
        return int(loops)

    def compute(self) -> None:
        for _ in range(self.loops):
            torch.mm(self.a, self.b)

    def reduce(self) -> None:
        for buffer in self.buffers:
            dist.all_reduce(buffer)

    def sequential(self) -> None:
        self.reduce()
        self.compute()

    def overlapped(self) -> None:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in self.buffers]
        self.compute()
        for work in works:
            assert work is not None
            work.wait()

    def timed(self, way: Callable[[], None]) -> float:
        """Seconds of one call that all ranks begin together."""
        dist.barrier()
        began = time.perf_counter()
        if self.late:
            time.sleep(LATE_SECONDS)
        way()
        return time.perf_counter() - began

    def measure(self, rounds: int) -> Times:
        """The ways by turns. Collective."""
        ways = {
            COMPUTE: self.compute,
            REDUCE: self.reduce,
            SEQUENTIAL: self.sequential,
            OVERLAPPED: self.overlapped,
        }
        taken: Times = {name: [] for name in ways}
        for number in range(rounds):
            # Another order in each round, the same on all ranks.
            for name in random.Random(number).sample(list(ways), len(ways)):
                taken[name].append(self.timed(ways[name]))
        return taken


def scene(ranks: int, count: int, late: bool, rounds: int) -> Times:
    """Start the ranks, measure, and take the slowest rank's time of each round."""
    by_rank = run_ranks(
        ranks,
        lambda rank: Scene(count, late).measure(rounds),
        kind="processes",
        timeout=timedelta(minutes=5),
    )
    counted = by_rank[:1] if late else by_rank
    return {
        way: [max(times) for times in zip(*(rank[way] for rank in counted), strict=True)]
        for way in by_rank[0]
    }


def hidden(times: Times) -> float:
    """The share of the shorter part that went on behind the longer one."""
    shorter = min(statistics.median(times[way]) for way in (COMPUTE, REDUCE))
    pairs = zip(times[SEQUENTIAL], times[OVERLAPPED], strict=True)
    return statistics.median(one - other for one, other in pairs) / shorter


def show(scenes: Sequence[tuple[int, bool, Times]], count: int, cores: int) -> Chart:
    """A table, and what it means."""
    console = Console()
    drawn = Table(title=f"milliseconds; {count} all_reduces of 16 MiB; {cores} cores")
    drawn.add_column("ranks")
    for name in (COMPUTE, REDUCE, SEQUENTIAL, OVERLAPPED, "hidden"):
        drawn.add_column(name, justify="right")
    for ranks, late, times in scenes:
        text = f"{ranks}, the last one {LATE_SECONDS * 1e3:.0f} ms late" if late else str(ranks)
        medians = (f"{statistics.median(taken) * 1e3:.1f}" for taken in times.values())
        drawn.add_row(text, *medians, f"{hidden(times):.0%}")
    console.print(drawn)
    console.print(
        "hidden: the share of the shorter one of compute and all_reduce that async saved, the "
        "median of all rounds. An all_reduce is work for cores, too: with as many ranks as cores "
        "no core is idle, and what runs behind the compute loop slows it down. Then async saves "
        "only what would be spent waiting, such as for a late peer."
    )
    return chart(drawn, (COMPUTE, REDUCE, SEQUENTIAL, OVERLAPPED))


def parse_options(cores: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    fewer = [cores // 2] if cores >= 4 else []
    default = [*fewer, max(2, cores), max(2, 2 * cores)]
    parser.add_argument("--ranks", type=int, nargs="+", default=default, metavar="N")
    parser.add_argument("--count", type=int, default=10, help="all_reduces in flight (default: 10)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, too")
    add_plot_option(parser)
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.count < 1 or options.rounds < 1:
        parser.error("at least 2 ranks, 1 all_reduce and 1 round are needed")
    return options


def main() -> None:
    cores = usable_cores()
    options = parse_options(cores)
    wanted = [(ranks, False) for ranks in options.ranks] + [(2, True)]
    scenes = [(n, late, scene(n, options.count, late, options.rounds)) for n, late in wanted]
    draw(options.plot, show(scenes, options.count, cores))
    if options.json:
        results = [
            {"ranks": ranks, "late_peer": late, "seconds": times, "hidden": hidden(times)}
            for ranks, late, times in scenes
        ]
        report = {"cores": cores, "all_reduces": options.count, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
