"""The price of training that outlives ranks, and how soon it goes on.

    python benchmarks/resilience.py                 # 4 ranks, a minute
    python benchmarks/resilience.py --ranks 2 --json out.json

Each way of holding a model of 10 M parameters is trained with and without ``Resilient`` by turns
in the same processes, so whatever else the machine does slows both. Of each the quickest turns
count, on the slowest rank. Then a rank is killed in the middle of a step, some times over: the time
from the kill to the end of the next step, on the last of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.launch.spawn import spawn
from tilework.parallel import DistributedDataParallel, Resilient, fully_shard

TURNS, STEPS = 6, 1
WAYS = ("replicated", "sharded")
VOCABULARY, CONTEXT = 256, 64


class Block(nn.Module):
    """A block of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, 32)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


def gpt() -> nn.Module:
    """10 M parameters."""
    width = 320
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(8)), nn.Linear(width, 256)
    )


def stack() -> nn.Module:
    """10 M parameters in linear layers, whose step is short: few rows."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10)))


#: By name: the model, and the rows of a rank's batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"gpt": (gpt, 8), "linear": (stack, 64)}


def build(model: str, way: str) -> dict[str, Any]:
    """The state of a way."""
    torch.manual_seed(0)
    module = MODELS[model][0]()
    if way == "replicated":
        module = DistributedDataParallel(module)
    else:
        for layer in module.children():
            fully_shard(layer)
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    return {"model": module, "optimizer": optimizer}


def train_step(state: dict[str, Any], model: str) -> None:
    """A step on random rows."""
    rows = MODELS[model][1]
    if model == "gpt":
        tokens = torch.randint(VOCABULARY, (rows, CONTEXT))
        loss = F.cross_entropy(state["model"](tokens).flatten(0, 1), tokens.flatten())
    else:
        loss = state["model"](torch.randn(rows, 1024)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()


@dataclass
class Cost:
    """Seconds of a step, alone and with copies of its state."""

    model: str
    way: str
    alone: float
    copied: float
    bytes: int

    @property
    def share(self) -> float:
        """The part of a step that copies take."""
        return self.copied / self.alone - 1


def measure(rank: int, model: str, way: str, folder: str) -> None:
    """On one rank: turns of steps with and without copies, of one and the same state."""
    dist.init_process_group()
    state = build(model, way)
    loop: Resilient[None] = Resilient(lambda: state, lambda s, number: train_step(s, model))
    steps = loop.run(10**9)
    for _ in range(3):
        next(steps)
    alone: list[float] = []
    copied: list[float] = []
    for _ in range(TURNS):
        for times, step in (
            (alone, lambda: train_step(state, model)),
            (copied, lambda: next(steps)),
        ):
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            times.append((time.perf_counter() - begun) / STEPS)
    figures = [min(alone), min(copied), loop.statistics()["snapshot_bytes"]]
    if rank == 0:
        Path(folder, "cost").write_text(json.dumps(figures))


def killed(rank: int, model: str, way: str, folder: str) -> None:
    """On one rank: steps in which the last rank is killed; the others note when they go on."""
    dist.init_process_group()
    moments: list[float] = []

    def step(state: dict[str, Any], number: int) -> None:
        if number == 4 and rank == int(os.environ["WORLD_SIZE"]) - 1:
            Path(folder, "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(state, model)

    loop: Resilient[None] = Resilient(lambda: build(model, way), step)
    for _ in loop.run(8):
        moments.append(time.monotonic())
    Path(folder, f"moments-{rank}").write_text(json.dumps(moments))


def recovery(ranks: int, model: str, way: str) -> tuple[float, float]:
    """Seconds from a kill to the end of the next step, and of a step before."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tilework", "run", "-n", str(ranks)]
        here = [str(Path(__file__).resolve()), "--as-rank", folder, model, way]
        elastic = ["--elastic", f"1:{ranks}"]
        subprocess.run([*program, *elastic, *here], check=True, capture_output=True)
        at = float(Path(folder, "killed").read_text())
        moments = [json.loads(p.read_text()) for p in Path(folder).glob("moments-*")]
        after = max(next(m for m in each if m > at) for each in moments)
        before = min(each[3] - each[2] for each in moments)
        return after - at, before


def cost(ranks: int, model: str, way: str) -> Cost:
    """The cost of copies."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (model, way, folder), nprocs=ranks)
        alone, copied, nbytes = json.loads(Path(folder, "cost").read_text())
        return Cost(model, way, alone, copied, nbytes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--kills", type=int, default=3, help="of each way")
    parser.add_argument("--only-kills", action="store_true", help="no costs of copies")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    add_plot_option(parser)
    options = parser.parse_args()
    if options.as_rank:
        folder, model, way = options.as_rank
        killed(int(os.environ["RANK"]), model, way, folder)
        return
    console = Console()
    costs = []
    if not options.only_kills:
        costs = [cost(options.ranks, m, w) for m in options.models for w in options.ways]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=f"Milliseconds a step, {options.ranks} ranks, {machine}")
    for name in ("model", "way", "step alone", "with copies", "more", "copied by all"):
        table.add_column(name, justify="left" if name in ("model", "way") else "right")
    for each in costs:
        milliseconds = [f"{1000 * seconds:.1f} ms" for seconds in (each.alone, each.copied)]
        more = f"{100 * each.share:+.1f} %"
        table.add_row(each.model, each.way, *milliseconds, more, f"{each.bytes / 1e6:.0f} MB")
    console.print(table)
    draw(options.plot, chart(table, ("step alone", "with copies"), labels=2))
    recoveries = {}
    for model in options.models if options.kills else ():
        for way in options.ways:
            times = [recovery(options.ranks, model, way) for _ in range(options.kills)]
            recoveries[f"{model} {way}"] = times
            middle, worst = statistics.median(t for t, _ in times), max(t for t, _ in times)
            step = min(s for _, s in times)
            console.print(
                f"{model} {way}: from kill -9 to the end of the next step {1000 * middle:.0f} ms "
                f"(worst of {len(times)}: {1000 * worst:.0f} ms); a step takes {1000 * step:.0f} ms"
            )
    if options.json:
        document = {"costs": [asdict(each) for each in costs], "recoveries": recoveries}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
