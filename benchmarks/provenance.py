"""What it costs that ranks compare what they do: cheap calls and steps, sampled against off.

    python benchmarks/provenance.py                     # 2 ranks: half a minute
    python benchmarks/provenance.py --against PYTHON    # and against another tilework: two minutes

The same processes run both modes by turns, many short ones, so that some are not disturbed by what
else the machine does; a call's time is that of the best turn, on the slowest rank. ``--against``
names the interpreter of an environment with another tilework: programs of both run one after the
other, several times, and the best of each counts.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dtensor import LIMIT, TILEWORK, UNCOMPARED, block, there_and_back
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilework.distributed as dist
import tilework.dtensor as ours
from tilework.testing import run_ranks

OTHER = "against"
#: Seconds of a turn, which is to be shorter than a time slice; and the calls of one of steps, so
#: that each turn has as many comparisons.
TURN_SECONDS, STEPS, LONG_STEPS = 2e-3, 64, 16
#: A case's microseconds by contestant.
Times = dict[str, dict[str, float]]
#: The most that the sampled mode may cost; and where comparing, or hashing a plain tensor, is a
#: fixed cost beside next to nothing.
GOAL, FIXED = 1.03, 1.1
PLAIN = torch.randn(8, 8)
OPERATORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, y, w: x + y,
    "times a number": lambda x, y, w: x * 2.0,
    "relu": lambda x, y, w: torch.relu(x),
    "view": lambda x, y, w: x.view(64),
    "in place": lambda x, y, w: x.add_(1.0),
    "mm": lambda x, y, w: x @ w,
    "plain operand": lambda x, y, w: x + PLAIN,
}


def cases(mesh: ours.DeviceMesh, rows: int) -> dict[str, Callable[[], object]]:
    """What is timed. Collective."""

    def cut(x: Tensor) -> Any:
        return ours.distribute_tensor(x, mesh, [ours.Shard(0)])

    def copied(x: Tensor) -> Any:
        return ours.distribute_tensor(x, mesh, [ours.Replicate()])

    x, y, w = cut(torch.randn(8, 8)), cut(torch.randn(8, 8)), copied(torch.randn(8, 8))
    found: dict[str, Callable[[], object]] = {
        name: functools.partial(call, x, y, w) for name, call in OPERATORS.items()
    }
    module = ours.distribute_module(block(), mesh)
    found["block"] = functools.partial(there_and_back, module, cut(torch.randn(rows, 8)))
    steps: dict[str, tuple[Any, nn.Module]] = {
        "SGD, tiny": (torch.optim.SGD, nn.Linear(2, 2)),
        "AdamW, block": (torch.optim.AdamW, block()),
        "AdamW, 10M": (torch.optim.AdamW, nn.Linear(3200, 3200)),
    }
    for name, (kind, plain) in steps.items():
        params = ours.distribute_module(copy.deepcopy(plain), mesh).parameters()
        found[name] = _optimizer(kind, list(params)).step
    return found


def _optimizer(kind: Any, params: Sequence[nn.Parameter]) -> Any:
    for param in params:
        param.grad = torch.zeros_like(param)
    return kind(params, lr=1e-3)


def measure(rank: int, ranks: int, rounds: int) -> Times:
    """Every case on one rank. Collective."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = ours.init_device_mesh("cpu", (ranks,))
    return {name: by_turns(call, rounds) for name, call in cases(mesh, 8 * ranks).items()}


def by_turns(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Microseconds of a call in both modes: the best turn. Collective."""
    seconds_of(call, 5)
    count = torch.tensor([int(TURN_SECONDS / seconds_of(call, 5))])
    dist.broadcast(count, 0)
    calls = int(count)
    if isinstance(getattr(call, "__self__", None), torch.optim.Optimizer):
        calls = STEPS if calls else LONG_STEPS
        rounds = rounds if int(count) else 3
    found = {UNCOMPARED: float("inf"), TILEWORK: float("inf")}
    for _ in range(rounds):
        for mode in found:
            dist.barrier()
            with ours.verifying("off" if mode == UNCOMPARED else "sampled"):
                found[mode] = min(found[mode], seconds_of(call, max(calls, 1)))
    return {mode: 1e6 * seconds for mode, seconds in found.items()}


def seconds_of(call: Callable[[], object], count: int) -> float:
    """Seconds of one of several calls."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def measured(ranks: int, rounds: int) -> Times:
    """Each case's times, on the slowest rank."""
    by_rank = run_ranks(ranks, measure, ranks, rounds, kind="processes", timeout=LIMIT)
    return {
        name: {who: max(times[name][who] for times in by_rank) for who in first}
        for name, first in by_rank[0].items()
    }


def measured_there(python: str, options: argparse.Namespace) -> Times:
    """The same with another interpreter, and the tilework that it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [python, __file__, "--ranks", options.ranks, "--rounds", options.rounds]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run(
            [*map(str, command), "--json", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        times: Times = json.loads(path.read_text())
        return times


def best(runs: Sequence[Times]) -> Times:
    """The least time of each call."""
    return {
        name: {who: min(run[name][who] for run in runs) for who in first}
        for name, first in runs[0].items()
    }


def show(here: Times, there: Times | None, console: Console) -> Chart:
    table = Table(title="Microseconds a call")
    table.add_column("case", no_wrap=True)
    for column in ("off", "sampled", "sampled / off", "goal", OTHER, "now / then"):
        table.add_column(column, justify="right")
    for name, times in here.items():
        ratio = times[TILEWORK] / times[UNCOMPARED]
        goal = FIXED if name in ("SGD, tiny", "plain operand") else GOAL
        row = [name, f"{times[UNCOMPARED]:,.2f}", f"{times[TILEWORK]:,.2f}"]
        row += [f"{ratio:.3f}" if ratio <= goal else f"[red]{ratio:.3f}[/]", f"{goal:.2f}"]
        if there is not None:
            then = there[name][TILEWORK]
            row += [f"{then:,.2f}", f"{times[TILEWORK] / then:.3f}"]
        table.add_row(*row)
    console.print(table)
    return chart(table, ("off", "sampled", OTHER) if there is not None else ("off", "sampled"))


def main() -> None:
    parser = argparse.ArgumentParser(description="What comparing ranks costs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200, help="turns that each gets")
    parser.add_argument("--against", help="an interpreter with another tilework")
    parser.add_argument("--runs", type=int, default=3, help="programs of each, with --against")
    parser.add_argument("--json", type=Path, help="write the times there")
    add_plot_option(parser)
    options = parser.parse_args()
    here, there = [], []
    for _ in range(options.runs if options.against else 1):
        if options.against:
            there.append(measured_there(options.against, options))
            here.append(measured_there(sys.executable, options))
        else:
            here.append(measured(options.ranks, options.rounds))
    console = Console()
    console.width = max(console.width, 100)
    draw(options.plot, show(best(here), best(there) if there else None, console))
    if options.json is not None:
        options.json.write_text(json.dumps(best(here), indent=1) + "\n")


if __name__ == "__main__":
    main()
