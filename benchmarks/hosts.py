"""Hybrid, exact and rounded, against flat Gloo on two hosts with a slow link: times and bytes.

    python benchmarks/hosts.py                  # as root: it makes two network namespaces
    python benchmarks/hosts.py --mbit 1000 --ranks 4
    python benchmarks/hosts.py --mbit 100 --delay 20 --loss 0.1
    python benchmarks/hosts.py --quick

All run by turns in the same processes, so that whatever else the machine does slows
all; only the ratios mean much. A call's time is the median on the slowest rank; the bytes are
those that the first host's interface sent per call, all headers included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from collectives import machine
from figures import KIB, MIB, geometric_mean, size_text
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # where tests are
from tests.hosts import Host, run_on_hosts, two_hosts, why_no_hosts

BACKENDS = ("hybrid", "bf16", "gloo")  # bf16: hybrid, which rounds sums between hosts
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
LEAST_CALLS = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    """What one turn may take, if that allows for the least number of calls."""


@dataclass(frozen=True)
class Cell:
    """One backend on one operation and size."""

    seconds: float
    sent_bytes: float


Calls = dict[str, Callable[[dist.ProcessGroup, torch.Tensor], object]]
#: On a tensor of the size in question: what each rank puts in, or gets where that is more.
CALLS: Calls = {
    "all_reduce": lambda g, x: dist.all_reduce(x, group=g),
    "broadcast": lambda g, x: dist.broadcast(x, src=0, group=g),
    "all_gather": lambda g, x: dist.all_gather_into_tensor(x, _part(x, g), group=g),
    "reduce_scatter": lambda g, x: dist.reduce_scatter_tensor(_part(x, g), x, group=g),
    "all_to_all": lambda g, x: dist.all_to_all_single(torch.empty_like(x), x, group=g),
}


def _part(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size())[group.rank()].clone()


def measure(rank: int, plan: Plan) -> list[dict[str, Cell]]:
    """This rank's figures by backend, for each cell. Collective."""
    rounds = dist.HybridOptions(between_hosts=torch.bfloat16)
    groups = {
        "hybrid": _member(dist.new_group(backend="hybrid")),
        "bf16": _member(dist.new_group(backend="hybrid", pg_options=rounds)),
        "gloo": _member(dist.new_group(backend="gloo")),
    }
    return [measure_cell(groups, operation, size, plan) for operation, size in cells(plan)]


def _member(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def cells(plan: Plan) -> Iterator[tuple[str, int]]:
    """Each (operation, bytes) of the table."""
    return ((operation, size) for operation in CALLS for size in plan.sizes)


def measure_cell(
    groups: dict[str, dist.ProcessGroup], operation: str, size: int, plan: Plan
) -> dict[str, Cell]:
    """The backends by turns."""
    call, tensor = CALLS[operation], torch.ones(size // 4)
    times: dict[str, list[float]] = {name: [] for name in groups}
    sent = dict.fromkeys(groups, 0)
    for _ in range(plan.rounds):
        for name, group in groups.items():
            count = affordable(group, call, tensor, plan.seconds)
            before = sent_bytes()
            for _ in range(count):
                begun = time.perf_counter()
                call(group, tensor)
                times[name].append(time.perf_counter() - begun)
            dist.barrier()  # so that all that was sent has left
            sent[name] += sent_bytes() - before
    return {
        name: Cell(statistics.median(taken), sent[name] / len(taken))
        for name, taken in times.items()
    }


def affordable(
    group: dist.ProcessGroup,
    call: Callable[[dist.ProcessGroup, torch.Tensor], object],
    tensor: torch.Tensor,
    seconds: float,
) -> int:
    """How many calls fit into ``seconds``; the same number on all ranks."""
    begun = time.perf_counter()
    call(group, tensor)
    count = torch.tensor(max(LEAST_CALLS, int(seconds / (time.perf_counter() - begun))))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return int(count)


def sent_bytes() -> int:
    """What this host's interfaces have sent, loopback aside."""
    lines = [line.split() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()]
    return sum(int(line[9]) for line in lines[2:] if line[0] != "lo:")


def slowest(by_rank: Sequence[dict[str, Cell]]) -> dict[str, Cell]:
    """The time of the slowest rank; the bytes as rank 0, on the first host, counted them."""
    return {
        name: Cell(max(cell[name].seconds for cell in by_rank), by_rank[0][name].sent_bytes)
        for name in BACKENDS
    }


def table(plan: Plan, figures: Sequence[dict[str, Cell]], title: str) -> Table:
    """What is printed."""
    drawn = Table(title=title)
    drawn.add_column("operation", no_wrap=True)
    drawn.add_column("size", justify="right", no_wrap=True)
    times, sent = ([f"{name}\n{unit}" for name in BACKENDS] for unit in ("ms", "MB sent"))
    for text in (*times, "x", *sent, "x"):
        drawn.add_column(text, justify="right")
    before = ""
    for (operation, size), cell in zip(cells(plan), figures, strict=True):
        if before not in ("", operation):
            drawn.add_section()
        ours, theirs = cell["hybrid"], cell["gloo"]
        ratio = theirs.seconds / ours.seconds
        drawn.add_row(
            "" if operation == before else operation,
            size_text(size),
            *(f"{cell[name].seconds * 1e3:.2f}" for name in BACKENDS),
            f"{ratio:.2f}" if ratio >= 1 else f"[bold red]{ratio:.2f} SLOWER[/]",
            *(f"{cell[name].sent_bytes / 1e6:.2f}" for name in BACKENDS),
            f"{theirs.sent_bytes / ours.sent_bytes:.2f}",
        )
        before = operation
    return drawn


def parse_options() -> argparse.Namespace:
    """The flags; ends the program with a message where they are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=int, default=400, help="the link, each way (400)")
    parser.add_argument("--delay", type=float, default=0.0, help="its milliseconds, each way (0)")
    parser.add_argument("--loss", type=float, default=0.0, help="its lost packets, in percent (0)")
    parser.add_argument("--ranks", type=int, default=2, help="on each host (2)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    add_plot_option(parser)
    options = parser.parse_args()
    why_not = why_no_hosts(options.delay or options.loss)
    if why_not is not None:
        parser.error(why_not)
    return options


def main() -> None:
    """Measure and print."""
    options = parse_options()
    plan = Plan(SIZES, rounds=5, seconds=0.3)
    if options.quick:
        plan = Plan(SIZES[::2], rounds=3, seconds=0.1)
    layout = [0] * options.ranks + [1] * options.ranks
    hosts: tuple[Host, Host]
    with two_hosts(options.mbit, options.delay, options.loss) as hosts:
        by_rank = run_on_hosts(
            hosts, layout, lambda rank: measure(rank, plan), timeout=timedelta(minutes=30)
        )
    figures = [slowest(cell) for cell in zip(*by_rank, strict=True)]
    console = Console()
    console.width = max(console.width, 100)  # a table in a file is not squeezed
    about = {**machine(), "load": round(os.getloadavg()[0], 2)}
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    link = f"{options.mbit} Mbit/s, {options.delay:g} ms, {options.loss:g} % lost"
    title = f"two hosts of {options.ranks} ranks, {link}; x: gloo's by hybrid's"
    shown = table(plan, figures, title)
    console.print(shown)
    draw(options.plot, chart(shown, ("hybrid\nms", "gloo\nms"), labels=2))
    times = geometric_mean([cell["gloo"].seconds / cell["hybrid"].seconds for cell in figures])
    sent = geometric_mean([cell["gloo"].sent_bytes / cell["hybrid"].sent_bytes for cell in figures])
    console.print(f"Gloo takes {times:.2f} times as long, and sends {sent:.2f} times as much")


if __name__ == "__main__":
    main()
