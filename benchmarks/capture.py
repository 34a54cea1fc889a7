"""Steps as programs: captured, beside plain, hand-written and DTensor steps, and torch.compile.

    python benchmarks/capture.py                  # 1 and 2 ranks: about four minutes
    python benchmarks/capture.py --ranks 2 --skip-compile
    python benchmarks/capture.py --overlap        # two large all_reduces beside arithmetic
    python benchmarks/capture.py --json out.json

The same processes run all contestants by turns; a step's time is the best of its turns, each of
which is a mean of many steps, on the slowest rank. Only ratios within one run mean much. *By hand*
is a plain model whose gradients are flattened, reduced by one ``all_reduce``, and handed out again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.tensor as torch_tensor
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.capture import capture
from tilework.capture.program.passes import PASSES
from tilework.dtensor import (
    DeviceMesh,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

LIMIT = timedelta(minutes=10)
#: Seconds of a turn, and the number of turns of each contestant.
TURN_SECONDS, TURNS = 0.05, 15

torch_distributed: Any = torch.distributed
Step = Callable[[], object]
#: Microseconds of a step, by case and contestant.
Times = dict[str, dict[str, float]]


class Block(nn.Module):
    """A layer of a GPT, of four heads."""

    attend = staticmethod(partial(F.scaled_dot_product_attention, is_causal=True))

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = self.attend(q, k, v)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class PlainBlock(Block):
    """A layer whose attention is products and a softmax: torch's DTensors take no other on CPUs."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed


def small_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))


def gpt_block() -> nn.Module:
    return Block(64)


#: By case: makes the model, the shape of a rank's batch, and whether an optimizer steps.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "small block": (small_block, (8, 8), False),
    "small block, AdamW": (small_block, (8, 8), True),
    "GPT block": (gpt_block, (2, 32, 64), False),
    "GPT block, AdamW": (gpt_block, (2, 32, 64), True),
}


def step_of(model: nn.Module, x: Tensor, steps: bool, reduce: bool = False) -> Step:
    """Forward and backward, and whatever else a step has."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params)
    sizes = [p.numel() for p in params]

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if reduce:
            grads = [p.grad for p in params if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat)
            for p, part in zip(params, flat.split(sizes), strict=True):
                p.grad = part.view_as(p)
        if steps:
            optimizer.step()
        return loss.detach()

    return step


def compiled_by_torch(model: nn.Module, x: Tensor, steps: bool) -> Step:
    """The hand-written step whose module torch.compile compiles."""
    return step_of(torch.compile(model), x, steps, reduce=True)  # type: ignore[arg-type]


def contestants(case: str, mesh: DeviceMesh, compiles: bool) -> tuple[dict[str, Step], Times]:
    """The steps of a case, and the seconds that capturing took. Collective."""
    make, shape, steps = CASES[case]
    ranks = mesh.size()

    def plain() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return make(), torch.randn(shape)

    def sharded() -> tuple[nn.Module, Tensor]:
        model, _ = plain()
        whole = torch.randn(shape[0] * ranks, *shape[1:])
        return distribute_module(model, mesh), distribute_tensor(whole, mesh, [Shard(0)])

    calls: dict[str, Step] = {
        "plain": step_of(*plain(), steps),
        "by hand": step_of(*plain(), steps, reduce=True),
        "DTensor": step_of(*sharded(), steps),
        "by hand, captured": capture(step_of(*plain(), steps, reduce=True)),
        "captured": capture(step_of(*sharded(), steps)),
    }
    if compiles:
        calls["torch.compile"] = compiled_by_torch(*plain(), steps)
        by_hand = step_of(*plain(), steps, reduce=True)
        calls["by hand, Inductor"] = capture(by_hand, backend="inductor")
        calls["Inductor"] = capture(step_of(*sharded(), steps), backend="inductor")
    seconds: dict[str, float] = {}
    for name, call in calls.items():
        call()
        begun = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - begun
        call()
    return calls, {case: seconds}


def by_turns(calls: dict[str, Step]) -> dict[str, float]:
    """Microseconds of each call: the best of its turns. Collective."""
    best = dict.fromkeys(calls, float("inf"))
    counts: dict[str, int] = {}
    for name, call in calls.items():
        begun = time.perf_counter()
        for _ in range(5):
            call()
        took = torch.tensor((time.perf_counter() - begun) / 5)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        counts[name] = max(3, int(TURN_SECONDS / took.item()))
    for _ in range(TURNS):
        for name, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(counts[name]):
                call()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - begun) / counts[name])
    return best


def small_costs() -> dict[str, float]:
    """Microseconds of one small collective, and of what surrounds a program of 100 parameters."""
    x = torch.ones(8)

    def reduce() -> None:
        dist.all_reduce(x)

    def none() -> None:
        x.add_(0)

    params: list[Tensor] = [nn.Parameter(torch.ones(2)) for _ in range(100)]

    def touch() -> object:
        with torch.no_grad():
            return torch._foreach_add(params, 1.0)[0]

    calls: dict[str, Step] = {"all_reduce of 32 bytes": reduce, "add_ of 32 bytes": none}
    calls |= {f"{name}, captured": capture(call) for name, call in list(calls.items())}
    calls["100 parameters"] = touch
    program = capture(touch)
    warm: list[Step] = [*calls.values(), program]
    for call in warm * 3:
        call()
    (record,) = program.records
    inputs = record.inputs_of([])
    assert inputs is not None
    calls["100 parameters, captured"] = program
    calls["of which the program itself"] = lambda: record.compute(inputs, [])
    return by_turns(calls)


def overlapping(rank: int) -> dict[str, float]:
    """Two all_reduces of 4 MiB beside arithmetic that takes as long, captured with passes."""
    torch.set_num_threads(1)
    x, y, z = [torch.zeros(1 << 20) for _ in range(3)]

    def reduce() -> None:
        dist.all_reduce(x)
        dist.all_reduce(y)

    def compute(count: int) -> Tensor:
        made = z
        for _ in range(count):
            made = made.sin()
        return made

    times = by_turns({"reduce": reduce, "compute": lambda: compute(1)})
    count = torch.tensor(max(1.0, times["reduce"] / times["compute"])).round()
    dist.broadcast(count, 0)

    def step() -> Tensor:
        reduce()
        return compute(int(count))

    calls: dict[str, Step] = {
        "the all_reduces": reduce,
        "the arithmetic": lambda: compute(int(count)),
    }
    for name, chosen in {"with start_early": PASSES, "without": [*PASSES[:-1]]}.items():
        before, PASSES[:] = list(PASSES), chosen
        calls[name] = capture(step)
        calls[name](), calls[name]()
        PASSES[:] = before
    return by_turns(calls)


def work(rank: int, ranks: int, compiles: bool) -> tuple[Times, Times, dict[str, float]]:
    """A rank's part."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    times: Times = {}
    seconds: Times = {}
    for case in CASES:
        calls, took = contestants(case, mesh, compiles)
        seconds |= took
        times[case] = by_turns(calls)
    return times, seconds, small_costs()


def compiling(rank: int, ranks: int, folder: str) -> dict[str, float]:
    """Seconds until a block with DTensors is compiled, forward and backward, with empty caches."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = torch_distributed.FileStore(f"{folder}/store", ranks)
    torch_distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    block, whole = PlainBlock(64), torch.randn(2 * ranks, 32, 64)
    theirs = torch_distributed.init_device_mesh("cpu", (ranks,))
    mesh = init_device_mesh("cpu", (ranks,))
    seconds: dict[str, float] = {}

    def take(name: str, make: Callable[[], Step], warm: int) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{len(seconds)}"
        step = make()
        for _ in range(warm):
            step()
        dist.barrier()
        begun = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - begun

    def torchs() -> Step:
        model = torch_tensor.distribute_module(copy.deepcopy(block), theirs)
        x = torch_tensor.distribute_tensor(whole, theirs, [torch_tensor.Shard(0)])
        return step_of(torch.compile(model), x, False)  # type: ignore[arg-type]

    def own() -> tuple[nn.Module, Tensor]:
        model = distribute_module(copy.deepcopy(block), mesh)
        return model, distribute_tensor(whole, mesh, [Shard(0)])

    def small() -> Step:
        def function() -> Tensor:
            return torch.ones(9).sin().sum()

        return cast(Step, torch.compile(function))

    def captured() -> Step:
        return capture(step_of(*own(), False), backend="inductor")

    take("a first small function", small, 0)  # imports the compiler
    take("captured", captured, 1)
    take("torch.compile of torch's DTensors", torchs, 0)
    torch_distributed.destroy_process_group()
    return seconds


def slowest(every: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in every) for name in every[0]}


def show(console: Console, title: str, times: Times, digits: int) -> Chart:
    table = Table(title=title)
    table.add_column("")
    names = list(next(iter(times.values())))
    for name in names:
        table.add_column(name, justify="right")
    for case, row in times.items():
        table.add_row(case, *[f"{row[name]:.{digits}f}" for name in names])
    console.print(table)
    return chart(table, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--skip-compile", action="store_true", help="leave Inductor out")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument("--overlap", action="store_true", help="measure start_early alone")
    add_plot_option(parser)
    options = parser.parse_args()
    console = Console(width=140)
    console.print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}")
    if options.overlap:
        took = slowest(run_ranks(2, overlapping, kind="processes", timeout=LIMIT))
        show(console, f"2 ranks, {os.cpu_count()} cores: µs", {"4 MiB, twice": took}, 0)
        return
    written: dict[str, Any] = {}
    charts = []
    for ranks in options.ranks:
        every = run_ranks(
            ranks, work, ranks, not options.skip_compile, kind="processes", timeout=LIMIT
        )
        times = {case: slowest([each[0][case] for each in every]) for case in CASES}
        seconds = {case: slowest([each[1][case] for each in every]) for case in CASES}
        costs = slowest([each[2] for each in every])
        charts.append(show(console, f"{ranks} ranks: a step, µs", times, 0))
        show(console, f"{ranks} ranks: the second call, s", seconds, 2)
        for name, value in costs.items():
            console.print(f"{name}: {value:.1f} µs")
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(ranks, compiling, ranks, folder, kind="processes", timeout=LIMIT)
        for name, value in slowest(found).items():
            console.print(f"compiling, {name}: {value:.1f} s")
        written[str(ranks)] = {"steps": times, "second call": seconds, "costs": costs}
    draw(options.plot, *charts)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
