"""What calls to another process cost: tilework's rpc, and torch.distributed.rpc (TensorPipe).

    python benchmarks/rpc.py                # 2 ranks on this host: about a minute
    python benchmarks/rpc.py --json out.json

Both are there at once in the same two processes, and take turns, so that whatever else the
machine does slows both. Medians over all turns; only the ratios mean much.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as reference
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

from tilework import rpc
from tilework.testing import run_ranks

TILEWORK, TORCH = "tilework", "torch (TensorPipe)"
MIB = 1 << 20
SIZES = (1 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB)
TURNS, TURN_SECONDS, MOST_CALLS = 9, 0.25, 500


def nothing(*_: Any) -> None:
    """Take the arguments, return nothing."""


def give(size: int) -> torch.Tensor:
    """A tensor that is there already."""
    return _tensors[size]


_tensors: dict[int, torch.Tensor] = {}


def join(rank: int, folder: str) -> None:
    """Have both."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _tensors.update({size: torch.ones(size // 4) for size in SIZES})
    rpc.init_rpc(f"w{rank}")
    options = reference.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/torch")
    reference.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def leave() -> None:
    """Leave both, when all is done."""
    reference.shutdown()
    rpc.shutdown()


Call = Callable[[], object]


def cases() -> dict[str, dict[str, Call]]:
    """What is compared, and how each does it."""
    found: dict[str, dict[str, Call]] = {}

    def add(title: str, fn: Callable[..., Any], *args: Any) -> None:
        found[title] = {
            TILEWORK: lambda: rpc.rpc_sync("w1", fn, args=args),
            TORCH: lambda: reference.rpc_sync("w1", fn, args=args),
        }

    add("nothing", nothing)
    for size in SIZES:
        add(f"{size_text(size)} there", nothing, _tensors[size])
    for size in SIZES:
        add(f"{size_text(size)} back", give, size)
    found["100 at once"] = {
        TILEWORK: lambda: [f.wait() for f in [rpc.rpc_async("w1", nothing) for _ in range(100)]],
        TORCH: lambda: [f.wait() for f in [reference.rpc_async("w1", nothing) for _ in range(100)]],
    }
    return found


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


def measure(rank: int, folder: str) -> dict[str, dict[str, float]]:
    """Median microseconds per call, by case and contestant."""
    join(rank, folder)
    medians: dict[str, dict[str, float]] = {}
    for title, calls in cases().items() if rank == 0 else ():
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(TURNS):
            for name in random.Random(number).sample(list(calls), len(calls)):
                taken[name] += turn(calls[name])
        medians[title] = {name: statistics.median(times) * 1e6 for name, times in taken.items()}
    leave()
    return medians


def turn(call: Call) -> list[float]:
    """Seconds of each of some calls."""
    call()  # not counted
    taken: list[float] = []
    end = time.perf_counter() + TURN_SECONDS
    while len(taken) < MOST_CALLS and (len(taken) < 3 or time.perf_counter() < end):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(2, measure, folder, kind="processes", timeout=timedelta(minutes=5))[0]
    title = f"Microseconds a call, load {os.getloadavg()[0]:.1f}"
    table = Table("call", TILEWORK, TORCH, "ratio", title=title)
    for title, row in found.items():
        ratio = row[TORCH] / row[TILEWORK]
        table.add_row(title, f"{row[TILEWORK]:,.0f}", f"{row[TORCH]:,.0f}", f"{ratio:.1f}")
    Console().print(table)
    draw(options.plot, chart(table, (TILEWORK, TORCH)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
