"""What a functional collective costs over one in place, per call; torch's on Gloo for reference.

    python benchmarks/functional.py                # 2 ranks, a few seconds
    python benchmarks/functional.py --json out.json

Rounds take turns, so that whatever else the machine does slows all of them; the best round of each
counts, and only the ratios mean much.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as reference
import torch.distributed._functional_collectives as torchs
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist
from tilework.distributed import functional
from tilework.testing import run_ranks

SIZES = (8, 4096, 1 << 20)
CALLS = {8: 200, 4096: 200, 1 << 20: 20}
ROUNDS = 5
IN_PLACE = "in place"


def ways(x: Any, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to all_reduce ``tensor``; ``x`` is torch's default group."""
    leaf = tensor.clone().requires_grad_()
    one = torch.ones_like(tensor)
    return {
        IN_PLACE: lambda: dist.all_reduce(tensor),
        "in place, on a clone": lambda: dist.all_reduce(tensor.clone()),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(tensor)),
        "functional, recorded": lambda: functional.wait_tensor(functional.all_reduce(leaf)),
        "functional, forward and backward": lambda: torch.autograd.grad(
            functional.all_reduce(leaf), leaf, one
        ),
        "torch on Gloo, in place": lambda: reference.all_reduce(tensor),
        "torch on Gloo, functional": lambda: torchs.wait_tensor(
            torchs.all_reduce(tensor, "sum", x)
        ),
    }


def measure(rank: int, n: int, folder: str) -> dict[str, dict[str, float]]:
    """Microseconds per call, by way and size."""
    warnings.simplefilter("ignore")
    reference.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=60),
    )
    best: dict[str, dict[str, float]] = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        made = ways(reference.group.WORLD, tensor)
        for _ in range(ROUNDS):
            for way, call in made.items():
                took = seconds(call, CALLS[size]) * 1e6
                row = best.setdefault(way, {})
                row[str(size)] = min(took, row.get(str(size), took))
    reference.destroy_process_group()
    return best


def seconds(call: Callable[[], object], calls: int) -> float:
    """Of one call."""
    for _ in range(calls // 10):
        call()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            options.ranks,
            measure,
            options.ranks,
            folder,
            kind="processes",
            timeout=timedelta(minutes=5),
        )[0]
    table = Table("all_reduce, µs per call", *(f"{size} B" for size in SIZES))
    for way, row in found.items():
        table.add_row(way, *(f"{row[str(size)]:.1f}" for size in SIZES))
    Console().print(table)
    draw(options.plot, chart(table, [f"{size} B" for size in SIZES]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
