"""How long ranks take to start: tilework run against torchrun and a bare ``import torch``.

    python benchmarks/startup.py                 # 4 ranks, about two minutes
    python benchmarks/startup.py --ranks 2 --rounds 3 --json out.json

Every round runs each command once, so that whatever else the machine does slows all of them;
only the ratios mean much. A time is that of the whole command, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

#: Prints its rank, as little as a script can do.
BARE = """
import os
import torch
print(os.environ["RANK"])
"""
#: Makes the default group and uses it once; the two packages take the same calls.
GROUP = """
import {package} as dist
dist.init_process_group({backend!r})
dist.barrier()
print(dist.get_rank())
dist.destroy_process_group()
"""

TILEWORK = [sys.executable, "-m", "tilework.cli", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@dataclass(frozen=True)
class Contestant:
    """One command, run once in each round."""

    name: str
    work: str
    command: list[str]
    ranks: int
    """How many lines it prints; 0: it prints nothing."""


def contestants(ranks: int, folder: Path) -> list[Contestant]:
    """The baseline first."""
    bare, ours, torchs = (folder / f"{name}.py" for name in ("bare", "ours", "torchs"))
    bare.write_text(BARE)
    ours.write_text(GROUP.format(package="tilework.distributed", backend="shm"))
    torchs.write_text(GROUP.format(package="torch.distributed", backend="gloo"))
    run = [*TILEWORK, "-n", str(ranks)]
    torchrun = [*TORCHRUN, "--nproc-per-node", str(ranks)]
    group = "init, barrier"
    return [
        Contestant("python", "import torch", [sys.executable, "-c", "import torch"], 0),
        Contestant("tilework run", "import torch", [*run, str(bare)], ranks),
        Contestant("tilework run", group, [*run, str(ours)], ranks),
        Contestant("tilework run --start spawn", group, [*run, "--start=spawn", str(ours)], ranks),
        Contestant("torchrun", "import torch", [*torchrun, str(bare)], ranks),
        Contestant("torchrun", group, [*torchrun, str(torchs)], ranks),
    ]


def seconds_of(contestant: Contestant) -> float:
    """Run it once; raises if it does not do its work."""
    began = time.perf_counter()
    done = subprocess.run(contestant.command, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - began
    if done.returncode != 0 or len(done.stdout.splitlines()) != contestant.ranks:
        raise RuntimeError(f"{contestant.name} failed:\n{done.stdout}{done.stderr}")
    return seconds


def measure(field: list[Contestant], rounds: int) -> list[list[float]]:
    """Seconds by contestant and round. One round before the first warms the disk's cache."""
    times: list[list[float]] = [[] for _ in field]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(field))
        for number in range(rounds + 1):
            for contestant, seen in zip(field, times, strict=True):
                seconds = seconds_of(contestant)
                if number:
                    seen.append(seconds)
                progress.advance(task)
    return times


def show(field: list[Contestant], times: list[list[float]], ranks: int) -> Chart:
    table = Table(title=f"From start to end, {ranks} ranks on {os.cpu_count()} cores")
    table.add_column("command")
    table.add_column("each rank does")
    for column in ("median s", "least s", "x import torch"):
        table.add_column(column, justify="right")
    for contestant, seen in zip(field, times, strict=True):
        ratio = ratio_to_first(seen, times[0])
        row = [f"{statistics.median(seen):.2f}", f"{min(seen):.2f}", f"{ratio:.2f}"]
        table.add_row(contestant.name, contestant.work, *row)
    Console().print(table)
    return chart(table, ("median s", "least s"), labels=2)


def ratio_to_first(seen: list[float], baseline: list[float]) -> float:
    """The median over rounds of this command's time over the baseline's in the same round."""
    return statistics.median(a / b for a, b in zip(seen, baseline, strict=True))


def results(field: list[Contestant], times: list[list[float]]) -> list[dict[str, object]]:
    return [
        {
            "command": contestant.name,
            "work": contestant.work,
            "seconds": seen,
            "ratio": ratio_to_first(seen, times[0]),
        }
        for contestant, seen in zip(field, times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up times of launchers, interleaved.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        field = contestants(options.ranks, Path(folder))
        times = measure(field, options.rounds)
    draw(options.plot, show(field, times, options.ranks))
    if options.json is not None:
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        report = {"ranks": options.ranks, "machine": machine, "results": results(field, times)}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
