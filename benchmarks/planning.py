"""Plans beside fact: the expected time of a step with each plan, and the time it takes here.

    python benchmarks/planning.py              # 2 ranks, one thread each: two minutes

This process measures blocks of a network (`measured_here`), pretends a step of each plan, and then
two processes run the plans by turns. Both sides count CPU seconds of the busiest rank, so that
others on the machine matter less, and the least of several steps; the wall time stands beside.
Waits take no CPU seconds: they are left out on both sides. The load is printed, and the errors.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import torch
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import nn

from tilework.comm.backends.machine import host_calibration
from tilework.plan import ModelPlan, measured_here, pretend
from tilework.plan.model_plan import backward
from tilework.plan.suggestions import step as planned_step
from tilework.testing import run_ranks

RANKS, TURNS = 2, 6
PLANS = (
    *(ModelPlan({name: 2}) for name in ("ddp", "fsdp", "tp", "cp")),
    ModelPlan({"pp": 2}, 2),
    ModelPlan({"pp": 2}, 4),
    *(ModelPlan({name: 2, "recompute": 1}) for name in ("ddp", "fsdp")),
)
#: Width and layers of models, rows of a batch, tokens of a row.
SIZES = ((256, 4, 4, 64), (512, 2, 4, 64), (384, 2, 8, 128))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            each(y).unflatten(-1, (-1, 64)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return result


def model_of(width: int, layers: int) -> nn.Module:
    """A model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def step(model: nn.Module, example: tuple[torch.Tensor, ...], optimizer: Any) -> None:
    """A step of training. Collective."""
    backward(model, example)
    optimizer.step()
    optimizer.zero_grad()


def measured(rank: int, size: tuple[int, ...]) -> list[tuple[float, float]]:
    """By plan, the least CPU seconds and the least seconds of a step. Collective."""
    torch.set_num_threads(1)
    width, layers, rows, tokens = size
    example = (torch.randn(rows, tokens, width),)
    steps: list[Callable[[], None]] = []
    for plan in PLANS:
        mine = plan.rows(example)
        model = plan.apply(model_of(width, layers), mine)
        optimizer = torch.optim.AdamW(model.parameters())
        steps += [partial(step, model, mine, optimizer)]
    least = [(float("inf"), float("inf"))] * len(steps)
    for turn in range(TURNS + 2):
        for number, run in enumerate(steps):
            begun = time.process_time(), time.perf_counter()
            run()
            if turn >= 2:
                now = time.process_time() - begun[0], time.perf_counter() - begun[1]
                least[number] = min(least[number][0], now[0]), min(least[number][1], now[1])
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_plot_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster = measured_here(host_calibration().measurements)
    rows: list[tuple[str, float, float, float]] = []
    for size in SIZES:
        width, layers, count, tokens = size
        found = run_ranks(RANKS, measured, size, kind="processes", timeout=timedelta(minutes=10))
        example = (torch.randn(count, tokens, width),)
        for number, plan in enumerate(PLANS):
            with pretend(RANKS, cluster=cluster) as job:
                report = job.run(planned_step, plan, partial(model_of, width, layers), example)
            expected = max(each.time.computing + each.time.moving for each in report.kinds)
            cpu, wall = (max(ranks[number][i] for ranks in found) for i in range(2))
            rows.append((f"{width} wide: {plan}", expected, cpu, wall))
    table = Table("plan", "expected ms", "CPU ms", "error", "wall ms")
    for name, expected, cpu, wall in rows:
        error = f"{expected / cpu - 1:+.0%}"
        table.add_row(name, f"{1e3 * expected:.1f}", f"{1e3 * cpu:.1f}", error, f"{1e3 * wall:.1f}")
    Console().print(table)
    draw(options.plot, chart(table, ("expected ms", "CPU ms", "wall ms")))
    pairs = [(a, b) for a, b in combinations(rows, 2) if max(a[2], b[2]) > 1.2 * min(a[2], b[2])]
    right = sum((a[1] < b[1]) == (a[2] < b[2]) for a, b in pairs)
    errors = sorted(abs(expected / cpu - 1) for _, expected, cpu, _ in rows)
    print(
        f"{right} of {len(pairs)} pairs that differ by more than 20 % are in order; the error is "
        f"{errors[len(errors) // 2]:.0%} in the median, {errors[-1]:.0%} at most; the fit says "
        f"±{cluster.error or 0:.0%}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
