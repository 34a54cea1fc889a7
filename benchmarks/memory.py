"""The memory of data-parallel training at its peak, beside what the method needs.

    python benchmarks/memory.py                                  # 2 ranks, some minutes
    python benchmarks/memory.py --ways DDP ZeRO --optimizers AdamW --dtypes float32 --json out.json

Each way trains a stack of linear layers in processes of its own, so that no other way's memory is
counted. A rank's memory is what is private to the process, and an equal part of what the ranks
share: the pages of their group's memory file. A thread of each rank looks every two milliseconds.
What the process has after a step of a tiny model is taken off.

Freed memory is given back at once, so that the table shows what is needed. With ``--heap`` malloc
keeps it, as it does in every program.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import tilework.distributed as dist
from tilework.parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard
from tilework.testing import run_ranks

ROWS, STEPS = 4, 3
LIMIT = timedelta(minutes=5)
OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
#: Optimizer states, in copies of the parameters.
STATES = {"SGD": 0, "AdamW": 2}
#: Layers that a step needs for a moment: a gradient on the way to its place, or in the optimizer
#: the last layer's denominator, the next one's, and the root that this is made of.
MOMENT = {"SGD": 1, "AdamW": 3}

#: A wrapped module and its optimizer.
Trained = tuple[Any, torch.optim.Optimizer]


@dataclass(frozen=True)
class Setting:
    """What is trained: ``layers`` matrices of ``width`` x ``width``."""

    layers: int
    width: int
    optimizer: str
    dtype: str
    ranks: int
    heap: bool

    def layer(self) -> nn.Module:
        return nn.Linear(self.width, self.width, False, dtype=getattr(torch, self.dtype))

    def stack(self) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(self.layer() for _ in range(self.layers)))

    def optimize(self, model: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=1e-3)
        return made

    @property
    def parameters(self) -> int:
        return self.layers * self.width**2


def alone(setting: Setting) -> Trained:
    """One process's step."""
    model = setting.stack()
    return model, setting.optimize(model)


def with_ddp(ddp: Any, **options: Any) -> Callable[[Setting], Trained]:
    def make(setting: Setting) -> Trained:
        model = ddp(setting.stack(), **options)
        return model, setting.optimize(model)

    return make


def with_zero(ddp: Any, zero: Any) -> Callable[[Setting], Trained]:
    def make(setting: Setting) -> Trained:
        model = ddp(setting.stack())
        return model, zero(model.parameters(), OPTIMIZERS[setting.optimizer], lr=1e-3)

    return make


def with_shards(shard: Any, meta: bool = False, **options: Any) -> Callable[[Setting], Trained]:
    def make(setting: Setting) -> Trained:
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        warnings.filterwarnings("ignore", "DTensor random operators")
        with torch.device("meta" if meta else "cpu"):
            model = setting.stack()
        for layer in model:
            shard(layer, **options)
        shard(model, **options)
        if meta:
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.01, 0.01)
        return model, setting.optimize(model)

    return make


def replicas(setting: Setting) -> float:
    """Parameters, gradients and states, and what one layer needs for a moment."""
    return 2 + STATES[setting.optimizer] + MOMENT[setting.optimizer] / setting.layers


def spread_states(setting: Setting) -> float:
    states = STATES[setting.optimizer] / setting.ranks
    return 2 + states + MOMENT[setting.optimizer] / setting.layers


def shards(setting: Setting) -> float:
    """Shards, and four times a layer: two gathered, a gradient, a collective's buffer."""
    return (2 + STATES[setting.optimizer]) / setting.ranks + 4 / setting.layers


def kept_whole(setting: Setting) -> float:
    """Shards but the gradients', all parameters, and a layer's gradient with the buffer."""
    return (1 + STATES[setting.optimizer]) / setting.ranks + 1 + 2 / setting.layers


GLOO, OWN = "gloo", "own"
KEEPS: dict[str, Any] = {"reshard_after_forward": False}
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
#: By name: the library of the group, what makes it, and the formula in copies of the parameters.
WAYS: dict[str, tuple[str, Callable[[Setting], Trained], Callable[[Setting], float]]] = {
    "alone": (OWN, alone, replicas),
    "torch DDP": (GLOO, with_ddp(TorchDDP), replicas),
    "torch DDP, views": (GLOO, with_ddp(TorchDDP, **VIEWS), replicas),
    "DDP": (OWN, with_ddp(DistributedDataParallel), replicas),
    "DDP, views": (OWN, with_ddp(DistributedDataParallel, **VIEWS), replicas),
    "torch DDP, no_sync": (GLOO, with_ddp(TorchDDP), replicas),
    "DDP, no_sync": (OWN, with_ddp(DistributedDataParallel), replicas),
    "DDP, views, no_sync": (OWN, with_ddp(DistributedDataParallel, **VIEWS), replicas),
    "torch ZeRO": (GLOO, with_zero(TorchDDP, TorchZeRO), spread_states),
    "ZeRO": (OWN, with_zero(DistributedDataParallel, ZeroRedundancyOptimizer), spread_states),
    "torch FSDP2": (GLOO, with_shards(torch_fully_shard), shards),
    "torch FSDP2, meta": (GLOO, with_shards(torch_fully_shard, meta=True), shards),
    "torch FSDP2, kept": (GLOO, with_shards(torch_fully_shard, **KEEPS), kept_whole),
    "fully_shard": (OWN, with_shards(fully_shard), shards),
    "fully_shard, meta": (OWN, with_shards(fully_shard, meta=True), shards),
    "fully_shard, kept": (OWN, with_shards(fully_shard, **KEEPS), kept_whole),
}


@dataclass
class Figures:
    """Bytes a parameter, on the rank with the most."""

    way: str
    optimizer: str
    dtype: str
    formula: float
    #: While the model was made; held then.
    making: float = 0.0
    made: float = 0.0
    #: At the peak of the first step, and of later ones; held after the last one.
    first: float = 0.0
    later: float = 0.0
    after: float = 0.0
    #: At the peak, as the system shows it: pages of other ranks count in full.
    resident: float = 0.0


def kilobytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def memory_files() -> dict[int, int]:
    """A descriptor of each memory file that this process has, by its number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                found[os.fstat(int(name)).st_ino] = int(name)
    return found


class Memory:
    """Bytes of this process's own memory, and of its part of the memory that ranks share."""

    def __init__(self, ranks: int) -> None:
        self._files, self._ranks = memory_files(), ranks
        self.begin = 0
        self.begin = self.held()

    def held(self) -> int:
        """Bytes more than at the begin."""
        shared = sum(512 * os.fstat(fd).st_blocks for fd in self._files.values())
        return 1024 * kilobytes("RssAnon") + shared // self._ranks - self.begin


@contextmanager
def peak(memory: Memory) -> Iterator[list[int]]:
    """A context, and a list whose only element is the most that was held in it, at its end."""
    most, done = [memory.held()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], memory.held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def measure(rank: int, way: str, setting: Setting, folder: str) -> list[float]:
    """On one rank: the figures of a way, in bytes a parameter."""
    torch.set_num_threads(1)
    if not setting.heap:
        mallopt: Any = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 16)  # what is freed goes back to the system at once, and is not counted
    kind, make, _ = WAYS[way]
    library: Any = torch_dist if kind == GLOO else dist
    where = {"init_method": f"file://{folder}/group", "rank": rank, "world_size": setting.ranks}
    if way != "alone":
        library.init_process_group(GLOO if kind == GLOO else None, **where)
    small, twice = replace(setting, layers=2, width=16), way.endswith("no_sync")
    train(*make(small), small, twice)  # what is imported and set up at the first use is not counted
    gc.collect()
    memory, resident = Memory(setting.ranks), kilobytes("VmRSS")
    with peak(memory) as making:
        model, optimizer = make(setting)
    made = memory.held()
    with peak(memory) as first:
        train(model, optimizer, setting, twice)
    with peak(memory) as later:
        for _ in range(STEPS):
            train(model, optimizer, setting, twice)
    after = memory.held()
    if way != "alone":
        library.barrier()
    grown = 1024 * (kilobytes("VmHWM") - resident)
    found = (making[0], made, first[0], later[0], after, grown)
    return [each / setting.parameters for each in found]


def train(model: Any, optimizer: torch.optim.Optimizer, setting: Setting, twice: bool) -> None:
    """A step, of two batches with ``twice``."""
    data = torch.ones(ROWS, setting.width, dtype=getattr(torch, setting.dtype))
    optimizer.zero_grad()
    if twice:
        with model.no_sync():
            torch.autograd.backward(nn.functional.mse_loss(model(data), data))
    torch.autograd.backward(nn.functional.mse_loss(model(data), data))
    optimizer.step()


def figures_of(way: str, setting: Setting) -> Figures:
    ranks = 1 if way == "alone" else setting.ranks
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = (ranks, measure, way, setting, folder)
        by_rank = run_ranks(*arguments, kind="processes", init=False, timeout=LIMIT)
    formula = WAYS[way][2](setting) * getattr(torch, setting.dtype).itemsize
    most = map(max, zip(*by_rank, strict=True))
    return Figures(way, setting.optimizer, setting.dtype, formula, *most)


def show(every: list[Figures], setting: Setting) -> Chart:
    millions = setting.parameters / 1e6
    table = Table(title=f"Bytes a parameter, {millions:.0f} M parameters, {setting.ranks} ranks")
    for column in ("way", "optimizer", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("formula", "peak", "more", "making", "made", "step 1", "after", "resident"):
        table.add_column(column, justify="right")
    for each in every:
        numbers = (each.formula, each.later, each.later - each.formula, each.making, each.made)
        rest = (each.first, each.after, each.resident)
        texts = [f"{number:.2f}" for number in (*numbers, *rest)]
        table.add_row(each.way, each.optimizer, each.dtype, *texts)
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    return chart(table, ("formula", "peak"), labels=3)


def main() -> None:
    parser = argparse.ArgumentParser(description="The memory of data-parallel training.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536, help="of each layer")
    parser.add_argument("--heap", action="store_true", help="malloc keeps what is freed")
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    every = []
    for optimizer in options.optimizers:
        for dtype in options.dtypes:
            sizes = options.layers, options.width
            setting = Setting(*sizes, optimizer, dtype, options.ranks, options.heap)
            every += [figures_of(way, setting) for way in options.ways]
    draw(options.plot, show(every, setting))
    if options.json is not None:
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        report = {"machine": machine, "figures": [asdict(each) for each in every]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
