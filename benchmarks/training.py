"""Steps of torch's own training loops on Gloo and on tilework, side by side on one host.

    python benchmarks/training.py                            # 2 ranks, two or three minutes
    python benchmarks/training.py --programs ddp fsdp --steps 10 --json out.json

The same processes run each program by turns: alone (what a rank computes, with nobody to talk
to), on Gloo, on tilework; several turns each. So whatever else the machine does slows all of them,
and only the ratios mean much. Of each turn the quickest step counts: others can only slow one.
Losses on Gloo and on tilework are compared before times are shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tilework.torch_backend
from tilework.launch.spawn import spawn

ALONE, GLOO, TILEWORK = "alone", "gloo", tilework.torch_backend.BACKEND_NAME
WAYS = (ALONE, GLOO, TILEWORK)
WARM_UP = 3

#: One step: returns the loss.
Step = Callable[[], Tensor]


class Layer(nn.Module):
    """Attention and a feed-forward part, in the shape that tensor parallelism cuts."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        inner = width // 8 * heads
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.out = nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # -1: with tensor parallelism this rank has some of the heads.
        q, k, v = (
            f(y).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        z: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return z


class GPT(nn.Module):
    """A small transformer over bytes: 3.3 million parameters."""

    def __init__(self, share: int = 1) -> None:
        """With ``share`` ranks, of each layer only what one of them would compute."""
        super().__init__()
        width = 256
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(
            *(Layer(width, 4 * width // share, 8 // share) for _ in range(4))
        )
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(x)))
        return logits


def tokens(rank: int) -> Tensor:
    return torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(rank))


def stepper(model: nn.Module, data: Tensor) -> Step:
    """Train ``model`` to predict the next byte; with a vector of floats, to copy it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        if data.is_floating_point():
            loss = nn.functional.mse_loss(model(data), data)
        else:
            logits = model(data[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def calls(rank: int, ranks: int, way: str) -> Step:
    """No training: 1000 times all_reduce of 8 bytes. Milliseconds are microseconds a call."""
    x = torch.zeros(2)

    def step() -> Tensor:
        for _ in range(0 if way == ALONE else 1000):
            dist.all_reduce(x)
        return x[0].clone()

    return step


def mlp(rank: int, ranks: int, way: str) -> Step:
    """DDP: an MLP of 4.2 million parameters with few samples, so that gradients weigh most."""
    model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    data = torch.randn(16, 1024, generator=torch.Generator().manual_seed(rank))
    return stepper(model if way == ALONE else DistributedDataParallel(model), data)


def ddp(rank: int, ranks: int, way: str) -> Step:
    """DDP: the transformer."""
    model = GPT()
    return stepper(model if way == ALONE else DistributedDataParallel(model), tokens(rank))


def fsdp(rank: int, ranks: int, way: str) -> Step:
    """FSDP (fully_shard): the transformer, each layer and the rest sharded."""
    model = GPT()
    return stepper(model if way == ALONE else sharded(model), tokens(rank))


def fsdp_shared(rank: int, ranks: int, way: str) -> Step:
    """FSDP with buffers from the group: tilework has shared memory for them, Gloo nothing."""
    model = GPT()
    if way != ALONE:
        sharded(model).set_allocate_memory_from_process_group_for_comm(True)
    return stepper(model, tokens(rank))


def sharded(model: GPT) -> Any:
    """``model`` itself, its layers and the rest each sharded over all ranks."""
    # It warns of views, which nothing here writes to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(rank: int, ranks: int, way: str) -> Step:
    """DTensor: each layer's matrices cut among the ranks, one all_reduce after each pair."""
    if way == ALONE:
        return stepper(GPT(ranks), tokens(0))
    model = GPT()
    cut = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan: dict[str, Any] = {**cut, "out": RowwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return stepper(model, tokens(0))


def accelerate(rank: int, ranks: int, way: str) -> Step:
    """Hugging Face accelerate: the transformer, prepared by an Accelerator."""
    model = GPT()
    if way == ALONE:
        return stepper(model, tokens(rank))
    library: Any = importlib.import_module("accelerate")
    for name in ("AcceleratorState", "GradientState", "PartialState"):
        getattr(library.state, name)._reset_state()
    accelerator = library.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    data = tokens(rank)

    def step() -> Tensor:
        logits = prepared(data[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PROGRAMS = {
    make.__name__: make
    for make in (calls, mlp, ddp, fsdp, fsdp_shared, tensor_parallel, accelerate)
}


@dataclass
class Figures:
    """One program's times."""

    program: str
    parameters: int = 0
    #: Milliseconds a step, by way and turn; the slowest rank's.
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    #: Mean over ranks of the last loss, by way.
    losses: dict[str, float] = field(default_factory=dict)

    def median(self, way: str) -> float:
        return statistics.median(self.milliseconds[way])

    @property
    def ratio(self) -> float:
        """How many times as long a step takes on Gloo; the median over turns."""
        pairs = zip(self.milliseconds[GLOO], self.milliseconds[TILEWORK], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def share(self, way: str) -> float:
        """Which part of a step is not this rank's own work."""
        pairs = zip(self.milliseconds[ALONE], self.milliseconds[way], strict=True)
        return statistics.median(max(0.0, 1 - alone / other) for alone, other in pairs)


def turn(program: str, rank: int, ranks: int, way: str, steps: int) -> tuple[float, float]:
    """Milliseconds of the quickest step (on the slowest rank), and the ranks' mean last loss."""
    torch.manual_seed(0)
    step = PROGRAMS[program](rank, ranks, way)
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - began)
    spent = torch.tensor([1000 * min(seconds)], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    dist.all_reduce(loss)
    return spent.item(), loss.item() / ranks


def measure(rank: int, ranks: int, folder: Path, options: argparse.Namespace) -> None:
    """On one rank: every program, every way, by turns. Rank 0 writes what it found."""
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    found, meetings = [], 0
    for program in options.programs:
        figures = Figures(program, sum(p.numel() for p in parameters_of(program)))
        for _ in range(options.turns):
            for way in WAYS:
                meetings += 1
                dist.init_process_group(
                    GLOO if way == GLOO else TILEWORK,
                    init_method=f"file://{folder}/{meetings}",
                    rank=rank,
                    world_size=ranks,
                )
                spent, figures.losses[way] = turn(program, rank, ranks, way, options.steps)
                figures.milliseconds[way].append(spent)
                dist.destroy_process_group()
        found.append(figures)
    if rank == 0:
        (folder / "found").write_text(json.dumps([asdict(figures) for figures in found]))


def parameters_of(program: str) -> list[Tensor]:
    if program == "calls":
        return []
    if program == "mlp":
        return [nn.Parameter(torch.empty(1024, n)) for n in (1024, 1) for _ in range(4)]
    return list(GPT().parameters())


def check(found: list[Figures]) -> None:
    """Training on tilework went as on Gloo."""
    for figures in found:
        ours, theirs = figures.losses[TILEWORK], figures.losses[GLOO]
        if abs(ours - theirs) > 1e-4 * abs(theirs):
            raise SystemExit(f"{figures.program}: loss {ours} on tilework, {theirs} on Gloo")


def show(found: list[Figures], ranks: int, threads: int) -> Chart:
    table = Table(
        title=f"Milliseconds a step, {ranks} ranks x {threads} thread(s), {os.cpu_count()} cores"
    )
    table.add_column("program", no_wrap=True)
    for column in ("size", "alone", "Gloo", "tilework", "x", "waits: Gloo", "tilework"):
        table.add_column(column, justify="right")
    for figures in found:
        table.add_row(
            figures.program,
            f"{figures.parameters / 1e6:.1f} M",
            *(f"{figures.median(way):.1f}" for way in WAYS),
            f"{figures.ratio:.2f}",
            *(f"{100 * figures.share(way):.0f} %" for way in (GLOO, TILEWORK)),
        )
    Console().print(table)
    return chart(table, ("alone", "Gloo", "tilework"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps on Gloo and on tilework.")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads for each rank")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None and "accelerate" in options.programs:
        options.programs.remove("accelerate")
        Console(stderr=True).print("accelerate is not installed and left out")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, Path(folder), options)
        spawn(measure, arguments, options.ranks, start="fork")
        found = [Figures(**each) for each in json.loads((Path(folder) / "found").read_text())]
    check(found)
    draw(options.plot, show(found, options.ranks, options.threads))
    if options.json is not None:
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        report = {
            "ranks": options.ranks,
            "machine": machine,
            "programs": [asdict(f) for f in found],
        }
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
