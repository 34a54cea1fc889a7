"""tilework's collectives on one host against its peers', as a table of times and ratios.

    python benchmarks/collectives.py            # 2 and 4 ranks, a minute or two
    python benchmarks/collectives.py --quick    # a rough look in half of that
    python benchmarks/collectives.py --ranks 2 --operations all_reduce --json out.json

The same processes run all peers by turns, so that whatever else the machine does at the time
slows all of them; only the ratios mean much. A call's time is the median on the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Call, Peer
from rich.console import Console
from rich.table import Table

import tilework
from tilework.testing import run_ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
#: The largest size of each operation: all_gather's output is that times the number of ranks.
LARGEST = {
    "all_reduce": 64 * MIB,
    "broadcast": 64 * MIB,
    "all_gather": 16 * MIB,
    "reduce_scatter": 16 * MIB,
    "all_to_all": 16 * MIB,
    "barrier": 0,
}
ITEM_BYTES = 4  # float32
LEAST_CALLS, MOST_CALLS = 3, 200  # of one peer in one round


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    """Turns that each peer gets on each cell."""
    seconds: float = 0.1
    """What one turn may take, if that allows for the least number of calls."""

    def cells(self) -> Iterator[tuple[str, int]]:
        """Each (operation, bytes) of the table."""
        for operation in self.operations:
            for size in self.sizes if LARGEST[operation] else (0,):
                if size <= LARGEST[operation]:
                    yield operation, size


@dataclass(frozen=True)
class Cell:
    """One line of the table for one number of ranks."""

    operation: str
    bytes: int
    ranks: int
    seconds: dict[str, float]
    """Of one call, by peer."""

    def ratio(self, peer: str) -> float:
        """How many times as long as tilework the peer takes."""
        return self.seconds[peer] / self.seconds[PEERS[0].name]


# -- on each rank ------------------------------------------------------------------------------


def measure(rank: int, ranks: int, plan: Plan, folder: Path) -> list[dict[str, float]]:
    """For each cell this rank's median seconds of a call, by peer. Collective."""
    peers = [peer(rank, ranks, folder) for peer in PEERS]
    medians = []
    for operation, size in plan.cells():
        if rank == 0:
            note(f"{ranks} ranks: {operation} {size_text(size)}")
        medians.append(measure_cell(peers, operation, size, plan))
    for peer in reversed(peers):
        peer.close()
    return medians


def measure_cell(peers: Sequence[Peer], operation: str, size: int, plan: Plan) -> dict[str, float]:
    """The peers by turns, on one operation and size."""
    calls = [peer.prepare(operation, items(size, operation)) for peer in peers]
    counts = [
        peer.agree(affordable(call, plan.seconds)) for peer, call in zip(peers, calls, strict=True)
    ]
    taken: list[list[float]] = [[] for _ in peers]
    for _ in range(plan.rounds):
        for times, call, count in zip(taken, calls, counts, strict=True):
            call()  # not counted: its processes come from the other peer's work
            for _ in range(count):
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
    return {peer.name: statistics.median(times) for peer, times in zip(peers, taken, strict=True)}


def items(size: int, operation: str) -> int:
    """Elements for a buffer of ``size`` bytes; all_to_all needs one for each of up to 4 ranks."""
    count = size // ITEM_BYTES
    return max(count, 4) if operation == "all_to_all" else count


def affordable(call: Call, seconds: float) -> int:
    """How many calls fit into ``seconds``."""
    begun = time.perf_counter()
    for _ in range(LEAST_CALLS):
        call()
    one = (time.perf_counter() - begun) / LEAST_CALLS
    return min(MOST_CALLS, max(LEAST_CALLS, int(seconds / one)))


def note(text: str) -> None:
    """Say on a terminal's last line what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


# -- the result --------------------------------------------------------------------------------


def run(ranks: int, plan: Plan) -> list[Cell]:
    """Start the ranks, measure, and put their results together."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(
            ranks,
            lambda rank: measure(rank, ranks, plan, Path(folder)),
            kind="processes",
            timeout=timedelta(hours=1),
        )
    note("")
    return [
        Cell(operation, size, ranks, {name: max(m[name] for m in medians) for name in medians[0]})
        for (operation, size), medians in zip(plan.cells(), zip(*by_rank, strict=True), strict=True)
    ]


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that fits ratios: of 2 and 1/2 it is 1."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def table(cells: Sequence[Cell]) -> Table:
    """Times in microseconds, and each peer's as a multiple of tilework's."""
    drawn = Table(title="microseconds a call; x: times tilework's")
    drawn.add_column("operation", no_wrap=True)
    drawn.add_column("size", justify="right", no_wrap=True)
    counts = sorted({cell.ranks for cell in cells})
    for ranks in counts:
        for peer in PEERS:
            drawn.add_column(f"{peer.name}\n{ranks} ranks", justify="right")
            if peer is not PEERS[0]:
                drawn.add_column("x", justify="right")
    lines: dict[tuple[str, int], list[str]] = {}
    for cell in cells:
        lines.setdefault((cell.operation, cell.bytes), []).extend(columns(cell))
    before = ""
    for (operation, size), texts in lines.items():
        if before not in ("", operation):
            drawn.add_section()
        drawn.add_row("" if operation == before else operation, size_text(size), *texts)
        before = operation
    return drawn


def columns(cell: Cell) -> list[str]:
    """What one number of ranks adds to a line of the table."""
    texts = []
    for peer, seconds in cell.seconds.items():
        texts.append(f"{seconds * 1e6:,.1f}")
        if peer != PEERS[0].name:
            ratio = cell.ratio(peer)
            texts.append(f"[bold red]{ratio:.2f} SLOWER[/]" if ratio < 1 else f"{ratio:.1f}")
    return texts


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """What --json writes."""
    others = [peer.name for peer in PEERS[1:]]
    counts: list[int | None] = [*sorted({cell.ranks for cell in cells}), None]
    return {
        "machine": machine(),
        "cells": [
            {
                "operation": cell.operation,
                "bytes": cell.bytes,
                "ranks": cell.ranks,
                "microseconds": {k: round(v * 1e6, 2) for k, v in cell.seconds.items()},
                "ratios": {name: round(cell.ratio(name), 3) for name in others},
            }
            for cell in cells
        ],
        "geometric_means": {
            name: {
                f"{ranks} ranks" if ranks else "all": round(
                    geometric_mean([c.ratio(name) for c in cells if ranks in (None, c.ranks)]), 3
                )
                for ranks in counts
            }
            for name in others
        },
        "slower_cells": {name: sum(cell.ratio(name) < 1 for cell in cells) for name in others},
    }


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilework": tilework.__version__,
    }


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Time over size, one picture for each operation, all in one PNG."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    operations = [name for name in LARGEST if name != "barrier"]
    figure, axes = pyplot.subplots(1, len(operations), figsize=(5 * len(operations), 4))
    for axis, operation in zip(axes, operations, strict=True):
        for ranks in sorted({cell.ranks for cell in cells}):
            chosen = [c for c in cells if (c.operation, c.ranks) == (operation, ranks)]
            for peer in PEERS if chosen else ():
                times = [cell.seconds[peer.name] * 1e6 for cell in chosen]
                label = f"{peer.name}, {ranks} ranks"
                axis.loglog([cell.bytes for cell in chosen], times, marker="o", label=label)
        axis.set(title=operation, xlabel="bytes", ylabel="microseconds")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def size_text(size: int) -> str:
    """A number of bytes, as in the table."""
    if size == 0:
        return "-"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def parse_options() -> argparse.Namespace:
    """The flags; ends the program with a message where they are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--operations", nargs="+", choices=LARGEST, default=list(LARGEST))
    parser.add_argument("--quick", action="store_true", help="fewer calls, no 64 MiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, too")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw them (needs matplotlib)")
    options = parser.parse_args()
    if min(options.ranks) < 2:
        parser.error("--ranks: a collective needs at least 2 ranks")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse_options()
    plan = Plan(tuple(options.operations))
    if options.quick:
        plan = Plan(plan.operations, SIZES[:-1], rounds=3, seconds=0.03)
    console = Console()
    console.width = max(console.width, 100)  # a table in a file is not squeezed
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    cells = [cell for ranks in options.ranks for cell in run(ranks, plan)]
    console.print(table(cells))
    results = summary(cells) | {"machine": about}
    for name, means in results["geometric_means"].items():
        told = ", ".join(f"{where} {mean:.1f}" for where, mean in means.items())
        slower = results["slower_cells"][name]
        console.print(f"{name} takes {told} times as long (geometric mean); slower cells: {slower}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    main()
