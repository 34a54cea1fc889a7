"""Data-parallel steps: torch's DDP and FSDP on Gloo and on tilework, and tilework's own.

    python benchmarks/data_parallel.py                       # 2 ranks, some minutes
    python benchmarks/data_parallel.py --models 1M many --ranks 4 --json out.json

The same processes train each model by turns in each way, several turns each, so whatever else the
machine does slows all of them. Of a turn the quickest step counts, on the slowest rank. The cost of
data parallelism is a step's time less that of the same step alone, without any other rank's
gradients; the ratios are those of these costs. Losses of all ways are compared before times are
shown. The floor of sharded parameters is the time of their *bare collectives*: for each layer two
all_gathers and a reduce_scatter of its size, one after the other, into memory that is there.
Clipping is that of all gradients by their norm: tilework's clip_grad_norm_ beside torch's.
"""

from __future__ import annotations

import argparse
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
import torch.distributed as torch_dist
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import tilework.distributed as dist
import tilework.torch_backend
from tilework.launch.spawn import spawn
from tilework.parallel import DistributedDataParallel, clip_grad_norm_, fully_shard

WARM_UP = 3
ROWS = 8


def stack(width: int, layers: int) -> nn.Module:
    """Linear layers of ``width`` x ``width``, one after the other."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Many(nn.Module):
    """10,000 parameters of four elements each, all of which are added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(10_000))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + torch.stack(list(self.small)).sum(0)
        return total


#: By name: the model, and the size of its inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "1M": (lambda: stack(512, 4), 512),
    "10M": (lambda: stack(1024, 10), 1024),
    "50M": (lambda: stack(2048, 12), 2048),
    "many": (Many, 4),
    "small": (lambda: stack(64, 50), 64),
}


def torch_fsdp(model: nn.Module) -> nn.Module:
    """Torch's FSDP2: each layer, and the model."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for layer in model.children():
        torch_fully_shard(layer)
    torch_fully_shard(model)
    return model


def own_fsdp(model: nn.Module) -> nn.Module:
    """Tilework's fully_shard: each layer, and the model."""
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


def own_views(model: nn.Module) -> nn.Module:
    """Tilework's DDP, gradients as views of buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


ON_TORCH_GLOO, ON_TORCH_TILEWORK, ON_TILEWORK = "gloo", tilework.torch_backend.BACKEND_NAME, "own"
#: By name: which groups there are, and what wraps the model.
WAYS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "alone": (ON_TILEWORK, lambda model: model),
    "torch DDP, Gloo": (ON_TORCH_GLOO, TorchDDP),
    "torch DDP, tilework": (ON_TORCH_TILEWORK, TorchDDP),
    "DDP": (ON_TILEWORK, DistributedDataParallel),
    "DDP, views": (ON_TILEWORK, own_views),
    "torch FSDP, Gloo": (ON_TORCH_GLOO, torch_fsdp),
    "torch FSDP, tilework": (ON_TORCH_TILEWORK, torch_fsdp),
    "fully_shard": (ON_TILEWORK, own_fsdp),
}
#: A parameter list has no forward to gather before.
NOT_SHARDED = ("many",)


@dataclass
class Figures:
    """The times of one model."""

    model: str
    parameters: int = 0
    #: Milliseconds a step, by way and turn.
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    #: Milliseconds to clip the gradients of sharded parameters, by way and turn.
    clipping: dict[str, list[float]] = field(default_factory=dict)
    #: Milliseconds to construct the wrapper, by way and turn.
    construction: dict[str, list[float]] = field(default_factory=dict)
    #: Milliseconds of the bare collectives of sharded parameters, by turn.
    bare: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)

    def cost(self, way: str) -> float:
        """Milliseconds that a step takes longer than alone; the median over turns."""
        pairs = zip(self.milliseconds[way], self.milliseconds["alone"], strict=True)
        return statistics.median(own - alone for own, alone in pairs)

    def ratio(self, way: str, base: str) -> float:
        """The cost of one way for each millisecond of another's."""
        return self.cost(way) / max(self.cost(base), 1e-6)


class Group:
    """A default group of torch's or of tilework's, for one turn."""

    def __init__(self, kind: str, where: str, rank: int, ranks: int) -> None:
        self._library: Any = dist if kind == ON_TILEWORK else torch_dist
        backend = None if kind == ON_TILEWORK else kind
        arguments = {"init_method": f"file://{where}", "rank": rank, "world_size": ranks}
        self._library.init_process_group(backend, **arguments)

    def __enter__(self) -> Any:
        return self._library

    def __exit__(self, *_: object) -> None:
        self._library.destroy_process_group()


def clock(options: argparse.Namespace) -> float:
    """Seconds: of the wall, or of the calling thread's work."""
    return time.thread_time() if options.cpu else time.perf_counter()


def turn(
    library: Any, figures: Figures, way: str, rank: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Milliseconds of the quickest step on the slowest rank, and of construction."""
    make, width = MODELS[figures.model]
    torch.manual_seed(0)
    plain = make()
    began = time.perf_counter()
    model = WAYS[way][1](plain)
    construction = 1000 * (time.perf_counter() - began)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))
    seconds = []
    loss = torch.zeros(())
    for at in range(WARM_UP + options.steps):
        library.barrier()
        began = clock(options)
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if at >= WARM_UP:
            seconds.append(clock(options) - began)
    spent = torch.tensor([1000 * min(seconds), construction], dtype=torch.float64)
    library.all_reduce(spent, library.ReduceOp.MAX)
    total = loss.detach().clone()
    library.all_reduce(total)
    figures.losses[way] = total.item()
    if "FSDP" in way or way == "fully_shard":
        figures.clipping.setdefault(way, []).append(clipping(library, model, way, options))
    return spent[0].item(), spent[1].item()


def clipping(library: Any, model: nn.Module, way: str, options: argparse.Namespace) -> float:
    """Milliseconds of the quickest clipping of gradients on the slowest rank."""
    clip = clip_grad_norm_ if way == "fully_shard" else nn.utils.clip_grad_norm_
    params, seconds = list(model.parameters()), []
    for at in range(WARM_UP + options.steps):
        library.barrier()
        began = clock(options)
        total: Any = clip(params, 1e9)
        getattr(total, "full_tensor", total.clone)()
        if at >= WARM_UP:
            seconds.append(clock(options) - began)
    spent = torch.tensor(1000 * min(seconds), dtype=torch.float64)
    library.all_reduce(spent, library.ReduceOp.MAX)
    return spent.item()


def bare_collectives(library: Any, figures: Figures, options: argparse.Namespace) -> float:
    """Milliseconds of the quickest round of a step's collectives on the slowest rank."""
    ranks = library.get_world_size()
    numels = [
        sum(p.numel() for p in layer.parameters())
        for layer in MODELS[figures.model][0]().children()
    ]
    shards = [torch.ones(-(-numel // ranks)) for numel in numels]
    fulls = [torch.ones(ranks * shard.numel()) for shard in shards]
    forth = list(zip(fulls, shards, strict=True))
    seconds = []
    for at in range(WARM_UP + options.steps):
        library.barrier()
        began = clock(options)
        for full, shard in forth:
            library.all_gather_into_tensor(full, shard)
        for full, shard in reversed(forth):
            library.all_gather_into_tensor(full, shard)
            library.reduce_scatter_tensor(shard, full)
        if at >= WARM_UP:
            seconds.append(clock(options) - began)
    spent = torch.tensor(1000 * min(seconds), dtype=torch.float64)
    library.all_reduce(spent, library.ReduceOp.MAX)
    return spent.item()


def measure(rank: int, ranks: int, folder: Path, options: argparse.Namespace) -> None:
    """On one rank: every model, every way, by turns. Rank 0 writes the figures."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    every, meetings = [], 0
    for name in options.models:
        figures = Figures(name, sum(p.numel() for p in MODELS[name][0]().parameters()))
        ways = [way for way in WAYS if name not in NOT_SHARDED or "DDP" in way or way == "alone"]
        for _ in range(options.turns):
            for way in ways:
                meetings += 1
                with Group(WAYS[way][0], f"{folder}/{meetings}", rank, ranks) as library:
                    step, construction = turn(library, figures, way, rank, options)
                    if WAYS[way][1] is own_fsdp:
                        figures.bare.append(bare_collectives(library, figures, options))
                figures.milliseconds.setdefault(way, []).append(step)
                figures.construction.setdefault(way, []).append(construction)
        every.append(figures)
    if rank == 0:
        (folder / "figures").write_text(json.dumps([asdict(figures) for figures in every]))


def check(every: list[Figures]) -> None:
    """All ways have trained alike."""
    for figures in every:
        base = figures.losses["torch DDP, Gloo"]
        for way, loss in figures.losses.items():
            if way != "alone" and abs(loss - base) > 1e-4 * abs(base):
                raise SystemExit(f"{figures.model}: loss {loss} by {way}, {base} by torch on Gloo")


def show(figures: Figures, ranks: int) -> Chart:
    """Print one model's table."""
    title = f"{figures.model}: {figures.parameters / 1e6:.2f} M parameters, {ranks} ranks"
    table = Table(title=f"{title}, {os.cpu_count()} cores, {cpu_name()}; milliseconds")
    table.add_column("way", no_wrap=True)
    for column in ("step", "above alone", "of torch on Gloo", "of torch on tilework", "construct"):
        table.add_column(column, justify="right")
    for way, times in figures.milliseconds.items():
        kind = "FSDP" if "FSDP" in way or way == "fully_shard" else "DDP"
        row = [f"{statistics.median(times):.2f}"]
        if way == "alone":
            row += ["", "", ""]
        else:
            row.append(f"{figures.cost(way):.2f}")
            bases = f"torch {kind}, Gloo", f"torch {kind}, tilework"
            row += [f"{figures.ratio(way, base):.2f}" for base in bases]
        table.add_row(way, *row, f"{statistics.median(figures.construction[way]):.1f}")
    console = Console(width=120)
    console.print(table)
    if figures.bare:
        bare = statistics.median(figures.bare)
        ratio = figures.cost("fully_shard") / bare
        console.print(f"bare collectives {bare:.2f} ms: fully_shard adds {ratio:.2f} times that")
    for way, times in figures.clipping.items():
        console.print(f"clipping by {way}: {statistics.median(times):.2f} ms")
    return chart(table, ("step",))


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What data parallelism adds to a step.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of the calling thread: for a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (options.ranks, Path(folder), options), options.ranks, start="fork")
        every = [Figures(**each) for each in json.loads((Path(folder) / "figures").read_text())]
    check(every)
    draw(options.plot, *[show(figures, options.ranks) for figures in every])
    if options.json is not None:
        machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__}
        report = {"ranks": options.ranks, "machine": machine, "models": [asdict(f) for f in every]}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
