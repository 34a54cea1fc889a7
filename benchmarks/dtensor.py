"""What DTensors cost: against plain tensors, torch's DTensor, and collectives written by hand.

    python benchmarks/dtensor.py                  # 1 and 2 ranks: about two minutes
    python benchmarks/dtensor.py --ranks 1 --rounds 3
    python benchmarks/dtensor.py --json out.json

The same processes run all contestants by turns, so that whatever else the machine does at the time
slows all of them; only ratios within one run mean much. A call's time is the best of its turns,
each of which is a mean of many calls, on the slowest rank. Results are compared before anything is
timed.
torch's DTensor runs on Gloo, ours on the default backend.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as reference
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilework.distributed as dist
import tilework.dtensor as ours
from tilework.layout import redistribution_steps
from tilework.testing import run_ranks

PLAIN, TILEWORK, TORCH, BY_HAND = "plain", "tilework", "torch", "by hand"
#: The same calls while ranks compare nothing.
UNCOMPARED = "off"
LIMIT = timedelta(minutes=10)
#: Calls within one turn take about so long.
TURN_SECONDS = 0.01

Call = Callable[[], object]
#: By case, how large the ratio may be; that of a block depends on the number of ranks.
GOALS = {
    **dict.fromkeys(("add", "mm", "relu", "view", "sum", "linear"), 0.55),
    "from_local": 0.5,
    "distribute_tensor": 0.4,
    "AdamW fused": 1.3,
}


@dataclass
class Row:
    """A case's times on one number of ranks."""

    case: str
    ranks: int
    #: Microseconds of a call on the slowest rank, by contestant.
    microseconds: dict[str, float]
    #: What is compared, and how large the ratio may be.
    over: str
    under: str
    goal: float

    @property
    def ratio(self) -> float:
        return self.microseconds[self.over] / self.microseconds[self.under]


class Contestant:
    """A package's DTensors on one rank."""

    def __init__(self, package: Any, ranks: int) -> None:
        self.package = package
        self.mesh = package.init_device_mesh("cpu", (ranks,))
        self.rows, self.whole = [package.Shard(0)], [package.Replicate()]

    def cut(self, tensor: Tensor) -> Any:
        return self.package.distribute_tensor(tensor, self.mesh, self.rows)

    def copy(self, tensor: Tensor) -> Any:
        return self.package.distribute_tensor(tensor, self.mesh, self.whole)

    def spread(self, module: nn.Module, placements: Mapping[str, Any] | None = None) -> nn.Module:
        """A copy of a module with replicated parameters, or cut by name."""
        made = copy.deepcopy(module)
        for prefix, part in made.named_modules():
            for name, param in list(part._parameters.items()):
                if param is not None:
                    how = (placements or {}).get(f"{prefix}.{name}", self.whole)
                    given = self.package.distribute_tensor(param.detach(), self.mesh, how)
                    part._parameters[name] = nn.Parameter(given)
        return made


# -- operators -------------------------------------------------------------------------------


def operators(contestants: Mapping[str, Contestant]) -> dict[str, dict[str, Call]]:
    """Single operators of 8x8 tensors, which cost nothing themselves."""
    a, b, bias = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    cases: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
        "add": lambda x, y, w, c: x + y,
        "mm": lambda x, y, w, c: x @ w,
        "relu": lambda x, y, w, c: torch.relu(x),
        "view": lambda x, y, w, c: x.view(64),
        "sum": lambda x, y, w, c: x.sum(0),
        "linear": lambda x, y, w, c: F.linear(x, w, c),
    }
    found: dict[str, dict[str, Call]] = {}
    for name, call in cases.items():
        of: dict[str, Call] = {PLAIN: functools.partial(call, a, b, b, bias)}
        for who, one in contestants.items():
            there = (one.cut(a), one.cut(b), one.copy(b), one.copy(bias))
            of[who] = functools.partial(call, *there)
            same(of[who](), call(a, b, b, bias))  # type: ignore[no-untyped-call]
        found[name] = of
    return found


def moves(contestants: Mapping[str, Contestant]) -> dict[str, dict[str, Call]]:
    """From plain tensors to DTensors, and between layouts."""
    a = torch.randn(8, 8)
    found: dict[str, dict[str, Call]] = {
        "from_local": {},
        "distribute_tensor": {},
        "redistribute": {},
    }
    for who, one in contestants.items():
        cut = one.cut(a)
        local = cut.to_local()
        make = one.package.DTensor.from_local
        found["from_local"][who] = functools.partial(
            make, local, one.mesh, one.rows, run_check=False
        )
        found["distribute_tensor"][who] = functools.partial(one.cut, a)
        found["redistribute"][who] = functools.partial(cut.redistribute, one.mesh, one.whole)
        same(found["redistribute"][who](), a)
    return found


# -- training --------------------------------------------------------------------------------


def block() -> nn.Module:
    """Linear, GELU, LayerNorm, Linear, of 8 features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))


def there_and_back(module: nn.Module, x: Any) -> None:
    """Forward, backward, gradients dropped."""
    module(x).sum().backward()
    for param in module.parameters():
        param.grad = None


def training(contestants: Mapping[str, Contestant], ranks: int) -> dict[str, dict[str, Call]]:
    """A small block's passes, and optimizer steps for its parameters."""
    module, x = block(), torch.randn(8 * ranks, 8)
    mine = x[:8]  # the plain step is what one rank does
    found: dict[str, dict[str, Call]] = {"block": {PLAIN: lambda: there_and_back(module, mine)}}
    copies = {who: one.spread(module) for who, one in contestants.items()}
    for who, one in contestants.items():
        found["block"][who] = functools.partial(there_and_back, copies[who], one.cut(x))
        same(copies[who](one.cut(x)), module(x))
    sampled = found["block"][TILEWORK]
    found["block, provenance"] = {UNCOMPARED: sampled, TILEWORK: sampled}
    for title, options in {
        "AdamW": dict[str, Any](),
        "AdamW foreach": {"foreach": True},
        "AdamW fused": {"fused": True},
    }.items():
        steps: dict[str, Call] = {}
        for who, params in [(PLAIN, module), *copies.items()]:
            trained = copy.deepcopy(params)
            for param in trained.parameters():
                param.grad = torch.zeros_like(param)
            steps[who] = torch.optim.AdamW(trained.parameters(), **options).step
        found[title] = steps
    return found


class GPTBlock(nn.Module):
    """A block of a GPT whose halves end in what adds up their terms over ranks."""

    def __init__(self, width: int, heads: int, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head_width, self.reduce = width // heads, reduce
        #: What all ranks of a group compute with: its gradient is the sum of theirs.
        self.enter: Callable[[Any], Any] = lambda x: x

    def forward(self, x: Any) -> Any:
        y = self.enter(self.norm1(x))
        q, k, v = (self.split(each(y)) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.reduce(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.reduce(self.down(F.gelu(self.up(self.enter(self.norm2(x))))))

    def split(self, x: Any) -> Any:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def gpt(one: Contestant, rank: int, ranks: int, options: argparse.Namespace) -> dict[str, Call]:
    """A block of real size, cut as Megatron-LM cuts it: DTensors, and the same by hand."""
    torch.manual_seed(1)
    width, heads = options.width, options.width // 64
    plain = GPTBlock(width, heads, lambda x: x)
    x = torch.randn(options.batch, options.length, width)
    by_column, by_row = [ours.Shard(0)], [ours.Shard(1)]
    cuts: dict[str, Any] = {
        **{f"{name}.weight": by_column for name in ("q", "k", "v", "up")},
        **{f"{name}.weight": by_row for name in ("out", "down")},
    }
    spread = one.spread(plain, cuts)
    spread.reduce = lambda y: y.redistribute(placements=one.whole)  # type: ignore[assignment]
    by_hand = copy.deepcopy(plain)
    for name, part in by_hand.named_modules():
        if f"{name}.weight" in cuts:
            dim = cuts[f"{name}.weight"][0].dim
            own = part.weight.detach().chunk(ranks, dim)[rank].clone()  # type: ignore[operator]
            part.weight = nn.Parameter(own)  # type: ignore[assignment]
    if ranks > 1:
        by_hand.reduce, by_hand.enter = Reduced.apply, Entered.apply  # type: ignore[assignment]
    there = one.copy(x)
    same(spread(there), by_hand(x).detach())
    same(spread(there), plain(x))
    return {
        TILEWORK: functools.partial(there_and_back, spread, there),
        BY_HAND: functools.partial(there_and_back, by_hand, x),
    }


class Reduced(torch.autograd.Function):
    """The sum of all ranks' terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Entered(torch.autograd.Function):
    """The same tensor on all ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


# -- measuring -------------------------------------------------------------------------------


def same(found: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(found.full_tensor().detach(), wanted.detach(), rtol=1e-4, atol=1e-4)


def by_turns(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Microseconds of a call, by contestant: the best turn."""
    best = dict.fromkeys(calls, float("inf"))
    counts = {name: affordable(call) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            with ours.verifying("off" if name == UNCOMPARED else "sampled"):
                begun = clock()
                for _ in range(counts[name]):
                    call()
                best[name] = min(best[name], (clock() - begun) / counts[name])
    return {name: 1e6 * seconds for name, seconds in best.items()}


def affordable(call: Call) -> int:
    """How many calls make a turn, as rank 0 sees it."""
    for _ in range(3):
        call()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(3):
        call()
    count = torch.tensor([int(3 * TURN_SECONDS / (time.perf_counter() - begun))])
    dist.broadcast(count, 0)
    return max(2, int(count))


def measure(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> Any:
    """On one rank, every case. Collective."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reference.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo{ranks}", rank=rank, world_size=ranks
    )
    clock = time.thread_time if options.cpu else time.perf_counter
    contestants = {TILEWORK: Contestant(ours, ranks), TORCH: Contestant(theirs, ranks)}
    rows = []

    def add(cases: Mapping[str, Mapping[str, Call]], over: str, under: str, goal: float) -> None:
        for case, calls in cases.items():
            times = by_turns(calls, options.rounds, clock)
            rows.append(Row(case, ranks, times, over, under, GOALS.get(case, goal)))

    add(operators(contestants), TILEWORK, TORCH, 0.55)
    add(moves(contestants), TILEWORK, TORCH, 0.5)
    passes = training(contestants, ranks)
    add({"block": passes.pop("block")}, TILEWORK, PLAIN, 1.6 if ranks == 1 else 2.0)
    add({"block, provenance": passes.pop("block, provenance")}, TILEWORK, UNCOMPARED, 1.03)
    add(passes, TILEWORK, PLAIN, 1.15)
    title = f"GPT block {options.batch}x{options.length}x{options.width}"
    add({title: gpt(contestants[TILEWORK], rank, ranks, options)}, TILEWORK, BY_HAND, 1.03)
    first = first_calls(contestants[TILEWORK])
    reference.destroy_process_group()
    return rows, first


def first_calls(one: Contestant) -> dict[str, float]:
    """Microseconds of calls that are decided anew, and how much a decision takes."""
    found = {}
    sizes = range(100, 200)
    pairs = [(one.cut(torch.zeros(n, 8)), one.copy(torch.zeros(8, 4))) for n in sizes]
    before = len(one.mesh.op_shardings)
    begun = time.perf_counter()
    for x, w in pairs:
        x @ w
    found["an operator's first call of new shapes"] = 1e4 * (time.perf_counter() - begun)
    found["decisions kept for them"] = len(one.mesh.op_shardings) - before
    begun = time.perf_counter()
    for _ in range(3):
        for x, w in pairs:
            x @ w
    found["later calls"] = 1e4 / 3 * (time.perf_counter() - begun)
    return found


def planning() -> dict[str, float]:
    """Microseconds to plan a redistribution on meshes of 1 to 4 axes for the first time."""
    found = {}
    for axes in range(1, 5):
        lengths = (4,) * axes
        dims = [ours.Shard(axis % 4) for axis in range(axes)]
        source: list[ours.Placement] = [*dims]
        target: list[ours.Placement] = [*reversed(dims)] if axes > 1 else [ours.Replicate()]
        begun = time.perf_counter()
        redistribution_steps((64, 64, 64, 64), lengths, source, target)
        found[f"planning on {axes} axes"] = 1e6 * (time.perf_counter() - begun)
    return found


def importing() -> dict[str, float]:
    """Microseconds that imports take after torch's own."""
    found = {}
    for name in ("tilework.dtensor", "torch.distributed.tensor"):
        program = (
            "import time, torch; begun = time.perf_counter(); import "
            f"{name}; print(time.perf_counter() - begun)"
        )
        times = [
            float(subprocess.check_output([sys.executable, "-c", program], text=True))
            for _ in range(3)
        ]
        found[f"import {name} after torch"] = 1e6 * min(times)
    return found


def combine(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """The slowest rank counts."""
    rows = []
    for same_case in zip(*by_rank, strict=True):
        first = same_case[0]
        most = {n: max(row.microseconds[n] for row in same_case) for n in first.microseconds}
        rows.append(Row(first.case, first.ranks, most, first.over, first.under, first.goal))
    return rows


# -- what is shown ---------------------------------------------------------------------------


def show(rows: Sequence[Row], others: Mapping[str, float], console: Console) -> Chart:
    table = Table(title="Microseconds a call")
    table.add_column("case", no_wrap=True)
    for column in (
        "ranks",
        PLAIN,
        UNCOMPARED,
        TILEWORK,
        TORCH,
        BY_HAND,
        "ratio",
        "goal",
        "torch / tilework",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        times = row.microseconds
        style = "" if row.ratio <= row.goal else "red"
        table.add_row(
            row.case,
            str(row.ranks),
            *(
                f"{times[who]:,.1f}" if who in times else "-"
                for who in (PLAIN, UNCOMPARED, TILEWORK, TORCH, BY_HAND)
            ),
            f"[{style}]{row.ratio:.2f}[/]" if style else f"{row.ratio:.2f}",
            f"{row.goal:.2f} of {row.under}",
            f"{times[TORCH] / times[TILEWORK]:.1f}" if TORCH in times else "-",
        )
    console.print(table)
    for what, value in others.items():
        console.print(f"{what}: {value:,.0f}" + ("" if "kept" in what else " us"))
    return chart(table, (PLAIN, UNCOMPARED, TILEWORK, TORCH, BY_HAND), labels=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="What DTensors cost.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40, help="turns that each gets")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of the calling thread: for a busy machine"
    )
    parser.add_argument("--width", type=int, default=512, help="features of the GPT block")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    if options.width < 128 or options.width % 128:
        parser.error(
            f"--width is a multiple of 128, a head of 64 for each of two ranks; got {options.width}"
        )
    rows: list[Row] = []
    others = {**importing(), **planning()}
    with tempfile.TemporaryDirectory() as folder:
        for n in options.ranks:
            found = run_ranks(n, measure, n, folder, options, kind="processes", timeout=LIMIT)
            rows += combine([each for each, _ in found])
            others |= {f"{what}, {n} ranks": value for what, value in found[0][1].items()}
    console = Console()
    console.width = max(console.width, 120)  # a table in a file is not squeezed
    draw(options.plot, show(rows, others, console))
    if options.json is not None:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        report = {
            "machine": machine,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
            "others": others,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
