"""Pipelines beside torch's: steps of stages that sleep, and of stages that are small.

    python benchmarks/pipeline.py                       # 2 ranks: a minute or two
    python benchmarks/pipeline.py --ranks 4 --microbatches 8

Stages that sleep take the time that a schedule reckons with, and no core: the step over the
schedule's duration is what the pipeline itself adds. Small stages (width 64) show the cost of
actions. The ways take turns; a time is the median over turns of the quickest step, on the slowest
rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import tilework.distributed as dist
import tilework.torch_backend  # noqa: F401  # registers the backend
from tilework.capture import capture
from tilework.mesh import init_device_mesh
from tilework.parallel import Schedule, pipeline
from tilework.testing import run_ranks

WIDTH, ROWS, WARM_UP = 64, 2, 3
_LIMIT = timedelta(minutes=10)
GLOO, PLUGIN, OWN = "torch on Gloo", "torch on tilework", "tilework"
PYTHON, INDUCTOR, WHOLE = "captured", "captured by Inductor", "step captured"
#: By way, torch's backend; None: tilework's own pipeline.
WAYS = {GLOO: "gloo", PLUGIN: "tilework", OWN: None, PYTHON: None, INDUCTOR: None, WHOLE: None}
CAPTURE: dict[str, Any] = {OWN: None, PYTHON: "python", INDUCTOR: "inductor"}
#: The maker of each schedule here, torch's class, and the stages of a rank.
KINDS: dict[str, tuple[Callable[[int, int], Schedule], str, int]] = {
    "gpipe": (Schedule.gpipe, "ScheduleGPipe", 1),
    "1F1B": (Schedule.one_forward_one_backward, "Schedule1F1B", 1),
    "interleaved": (Schedule.interleaved, "ScheduleInterleaved1F1B", 2),
    "zero bubble": (Schedule.zero_bubble, "ScheduleInterleavedZeroBubble", 1),
    "ZB-V": (Schedule.v, "ScheduleZBVZeroBubble", 2),
}


#: Milliseconds of each turn, by kind of schedule and way.
Times = dict[tuple[str, str], list[float]]


class Sleep(torch.autograd.Function):
    """Sleeps for a time, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Sleeping(nn.Module):
    """A stage that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(WIDTH)), seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x * self.scale, self.seconds)  # type: ignore[no-untyped-call]
        return result


def model_of(stages: int, seconds: float) -> nn.Sequential:
    """A model of equal stages; they are small if they do not sleep."""
    torch.manual_seed(0)
    if seconds:
        return nn.Sequential(*(Sleeping(seconds) for _ in range(stages)))
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    )


def square(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return nn.functional.mse_loss(output, target)


def own_step(kind: str, model: nn.Sequential, microbatches: int, way: str) -> Callable[[], object]:
    """A step of tilework's pipeline."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    plan = KINDS[kind][0](ranks, microbatches)
    cuts = any(action.kind == "weights" for action in plan.actions[0])
    how: Any = "python" if way == WHOLE and cuts else CAPTURE.get(way)
    stages = pipeline(model, mesh, schedule=plan, capture=how)
    x = torch.ones(ROWS * microbatches, WIDTH)

    def step(x: Tensor) -> Tensor:
        return stages.step(x, target=x, loss=square, weight="rows")

    run = capture(step) if way == WHOLE else step
    return lambda: run(x)


def torch_step(kind: str, model: nn.Sequential, microbatches: int) -> Callable[[], object]:
    """A step of torch's pipeline."""
    make, name, several = KINDS[kind]
    rank, ranks = torch_dist.get_rank(), torch_dist.get_world_size()
    home = make(ranks, microbatches).home
    stages = [
        PipelineStage(model[index], index, len(model), torch.device("cpu"))
        for index in range(several * ranks)
        if home[index] == rank
    ]
    one_or_all: Any = stages if several > 1 or kind == "zero bubble" else stages[0]
    schedule = getattr(schedules, name)(one_or_all, microbatches, loss_fn=square)
    x = torch.ones(ROWS * microbatches, WIDTH)
    arguments = [x] if rank == 0 else []
    targets = {"target": x} if any(each.is_last for each in stages) else {}
    return lambda: schedule.step(*arguments, **targets)


def turn(library: Any, step: Callable[[], object], steps: int) -> float:
    """Milliseconds of the quickest step on the slowest rank."""
    seconds = []
    for at in range(WARM_UP + steps):
        library.barrier()
        began = time.perf_counter()
        step()
        if at >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    spent = torch.tensor(1000 * min(seconds), dtype=torch.float64)
    library.all_reduce(spent, library.ReduceOp.MAX)
    return spent.item()


def is_measured(kind: str, way: str, sleep: float) -> bool:
    """True for ways that exist: a program does not sleep, and a backward in two is captured."""
    return not (sleep and way in (PYTHON, INDUCTOR, WHOLE)) and not (
        way == OWN and kind in ("zero bubble", "ZB-V")
    )


def measure(rank: int, folder: str, options: argparse.Namespace) -> Times:
    """By kind of schedule and way: milliseconds of each turn, on one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", str(rank))
    found: Times = {}
    for at, kind, (way, backend) in itertools.product(range(options.turns), KINDS, WAYS.items()):
        if not is_measured(kind, way, options.sleep):
            continue
        model = model_of(KINDS[kind][2] * options.ranks, options.sleep / 1000)
        if backend is None:
            step = own_step(kind, model, options.microbatches, way)
            taken = turn(dist, step, options.steps)
        else:
            where = f"file://{folder}/{at}-{kind}-{way}".replace(" ", "-")
            torch_dist.init_process_group(
                backend, init_method=where, rank=rank, world_size=options.ranks
            )
            step = torch_step(kind, model, options.microbatches)
            taken = turn(torch_dist, step, options.steps)
            torch_dist.destroy_process_group()
        found.setdefault((kind, way), []).append(taken)
    return found


def show(found: Times, options: argparse.Namespace) -> Chart:
    """Print a table: the step over the ideal for stages that sleep, else over torch's on Gloo."""
    sleeps = options.sleep > 0
    title = f"{options.ranks} ranks, {options.microbatches} microbatches, " + (
        f"stages that sleep {options.sleep:g} ms: step / ideal"
        if sleeps
        else "small stages: milliseconds of a step, and its share of torch's on Gloo"
    )
    table = Table(title=title)
    for head in ("", "bubble", *WAYS):
        table.add_column(head, justify="right" if head else "left")
    for kind, (make, *_) in KINDS.items():
        plan = make(options.ranks, options.microbatches)
        ms = {way: statistics.median(found[kind, way]) for way in WAYS if (kind, way) in found}
        cells = [
            ""
            if way not in ms
            else f"{ms[way] / (plan.duration * options.sleep):.3f}"
            if sleeps
            else f"{ms[way]:.2f} ({ms[way] / ms[GLOO]:.2f})"
            for way in WAYS
        ]
        table.add_row(kind, f"{plan.bubble:.3f}", *cells)
    Console(width=110).print(table)
    return chart(table, list(WAYS))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=4.0, help="milliseconds of a forward")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="leave out the stages that sleep")
    add_plot_option(parser)
    options = parser.parse_args()
    charts = []
    for sleep in (0.0,) if options.small else (options.sleep, 0.0):
        options.sleep = sleep
        with tempfile.TemporaryDirectory() as folder:
            ranks = options.ranks
            found = run_ranks(ranks, measure, folder, options, kind="processes", timeout=_LIMIT)
        charts.append(show(found[0], options))
    draw(options.plot, *charts)


if __name__ == "__main__":
    main()
