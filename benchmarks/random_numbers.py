"""Random numbers, counter-based against torch's own CPU generator: nanoseconds per element.

    python benchmarks/random_numbers.py                 # a minute
    python benchmarks/random_numbers.py --threads 2     # torch may use two; tilework uses one
    python benchmarks/random_numbers.py --elements 1000 65536 --json out.json

Both fill the same tensor and take turns; the best round of each counts, and only the ratios mean
much. Dropout is the whole operator: torch's, and a scaled mask times the input.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from tilework.dtensor.random.philox import Bernoulli, Integers, Key, Normal, Uniform, fill

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KEY = Key(seed=1, stream=2)
KEEP = 0.9
MOST_CALLS = 1000  # in one round

Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """One operation on one tensor."""

    operation: str
    dtype: str
    elements: int
    tilework_ns: float
    """Per element."""
    torch_ns: float

    @property
    def ratio(self) -> float:
        return self.torch_ns / self.tilework_ns


def operations(elements: int) -> Iterator[tuple[str, Tensor, Call, Call]]:
    """Name, the tensor that is filled, how tilework does it, how torch does."""
    for dtype in FLOATS:
        x = torch.ones(elements, dtype=dtype)
        yield "uniform_", x, partial(fill, x, KEY, Uniform()), x.uniform_
        yield "normal_", x, partial(fill, x, KEY, Normal()), x.normal_
        yield "bernoulli_", x, partial(fill, x, KEY, Bernoulli(KEEP)), partial(x.bernoulli_, KEEP)
        yield "dropout", x, partial(dropped, x), partial(functional.dropout, x, 1 - KEEP)
    mask = torch.empty(elements, dtype=torch.bool)
    yield (
        "bernoulli_",
        mask,
        lambda: fill(mask, KEY, Bernoulli(KEEP)),
        lambda: mask.bernoulli_(KEEP),
    )
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = torch.empty(elements, dtype=dtype)
        few = Integers(0, 100)
        every = Integers(0, torch.iinfo(dtype).max)
        yield "random_(100)", x, partial(fill, x, KEY, few), partial(x.random_, 100)
        yield "random_()", x, partial(fill, x, KEY, every), x.random_


def dropped(x: Tensor) -> Tensor:
    """As F.dropout does it."""
    return fill(torch.empty_like(x), KEY, Bernoulli(KEEP, 1 / KEEP)).mul_(x)


def best_of(calls: list[Call], rounds: int, elements: int) -> list[float]:
    """Nanoseconds per element of each call, which take turns."""
    count = max(1, min(MOST_CALLS, (1 << 20) // elements))
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            begun = time.perf_counter_ns()
            for _ in range(count):
                call()
            best[i] = min(best[i], (time.perf_counter_ns() - begun) / count / elements)
    return best


def measure(sizes: list[int], rounds: int) -> Iterator[Timed]:
    for elements in sizes:
        for operation, tensor, ours, theirs in operations(elements):
            times = best_of([ours, theirs], rounds, elements)
            yield Timed(operation, str(tensor.dtype).removeprefix("torch."), elements, *times)


def show(timed: list[Timed], threads: int) -> Chart:
    table = Table(title=f"Nanoseconds per element, torch with {threads} thread(s)")
    for column in ("operation", "dtype"):
        table.add_column(column)
    for column in ("elements", "tilework", "torch", "ratio"):
        table.add_column(column, justify="right")
    for t in timed:
        times = f"{t.tilework_ns:.2f}", f"{t.torch_ns:.2f}", f"{t.ratio:.1f}"
        table.add_row(t.operation, t.dtype, f"{t.elements:,}", *times)
    console = Console()
    console.print(table)
    mean, least = statistics.geometric_mean(t.ratio for t in timed), min(t.ratio for t in timed)
    console.print(f"torch takes {mean:.1f} times as long (geometric mean), at least {least:.1f}")
    return chart(table, ("tilework", "torch"), labels=3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random numbers, timed against torch's.")
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 12, 1 << 16, 1 << 20])
    parser.add_argument("--threads", type=int, default=1, help="that torch may use")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timed = list(measure(options.elements, options.rounds))
    draw(options.plot, show(timed, options.threads))
    if options.json is not None:
        machine = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "threads": options.threads,
        }
        figures = [asdict(t) | {"ratio": t.ratio} for t in timed]
        options.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
