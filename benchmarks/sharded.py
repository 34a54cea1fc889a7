"""Sharded tensors against torch's ShardedTensor on Gloo, and against a bare all_to_all.

    python benchmarks/sharded.py                  # 2 and 4 ranks: about a minute
    python benchmarks/sharded.py --ranks 2 --mib 16 --rounds 3
    python benchmarks/sharded.py --json out.json

The same processes run all contestants by turns, so that whatever else the machine does at the time
slows all of them; only ratios within one run mean much. A call's time is the median on the slowest
rank. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as reference
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

import tilework.distributed as dist
import tilework.sharded as ours
from tilework.testing import run_ranks

warnings.simplefilter("ignore")  # torch's ShardedTensor is deprecated, and says so at each step
from torch.distributed._shard import sharded_tensor as theirs  # noqa: E402
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirChunkShardingSpec  # noqa: E402

TILEWORK, GLOO = "tilework", "torch on Gloo"
#: tilework's all_to_all of as many bytes, into memory that is there already.
BARE = "bare all_to_all"
#: Likewise, into memory that is new each time, as a reshard's result is.
FRESH = "bare, to new memory"
LIMIT = timedelta(minutes=5)
MIB = 1 << 20
#: Ranks of the metadata that is built, without so many processes.
MANY_RANKS = 1000
#: The most calls of one contestant in one round.
MOST_CALLS = 20

Call = Callable[[], object]


@dataclass
class Row:
    """A case's times on one number of ranks."""

    case: str
    ranks: int
    bytes: int
    #: Microseconds of a call on the slowest rank, by contestant.
    microseconds: dict[str, float]
    #: By how many MiB a process grew at most while it ran once, beyond source and destination.
    extra_mib: dict[str, float]


class Contestant:
    """A package's sharded tensors on one rank.

    Args:
        package: Its functions.
        spec: Its ChunkShardingSpec.
        ranks: How many ranks there are.
    """

    def __init__(self, package: Any, spec: Any, ranks: int) -> None:
        self.package, self.spec, self.ranks = package, spec, ranks

    def chunks(self, dim: int, ranks: int | None = None) -> Any:
        """Chunks along a dim, one a rank."""
        return self.spec(dim, [f"rank:{rank}/cpu" for rank in range(ranks or self.ranks)])

    def numbered(self, side: int, dim: int) -> Any:
        """A square whose elements are their numbers."""
        made = self.package.empty(self.chunks(dim), side, side)
        (shard,) = made.local_shards()
        whole = torch.arange(side * side, dtype=torch.float32).view(side, side)
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[row : row + rows, column : column + columns])
        return made


def cases(side: int, small: int, rank: int, ranks: int) -> dict[str, tuple[int, dict[str, Call]]]:
    """What is timed: bytes of the whole tensor, and each contestant's call."""
    both = {
        TILEWORK: Contestant(ours, ours.ChunkShardingSpec, ranks),
        GLOO: Contestant(theirs, TheirChunkShardingSpec, ranks),
    }
    of = {}
    of["create"] = 4 * side * side, {name: creation(c, side) for name, c in both.items()}
    of[f"metadata of {MANY_RANKS} ranks"] = 0, {name: metadata(c) for name, c in both.items()}
    for n in (small, side):
        whole = 4 * n * n
        bare = {BARE: exchange(n * n // ranks), FRESH: exchange(n * n // ranks, fresh=True)}
        of[f"gather {size(whole)}"] = (
            whole,
            {
                **{name: gathering(c, n, rank) for name, c in both.items()},
                **bare,
            },
        )
        of[f"rows to columns {size(whole)}"] = (
            whole,
            {
                **{name: resharding(c, n) for name, c in both.items()},
                **bare,
            },
        )
    return of


def creation(contestant: Contestant, side: int) -> Call:
    spec = contestant.chunks(0)
    return lambda: contestant.package.empty(spec, side, side)


def metadata(contestant: Contestant) -> Call:
    spec = contestant.chunks(0, MANY_RANKS)
    properties = contestant.package.TensorProperties(dtype=torch.float32)
    rows = itertools.count(1 << 20)  # other ones each time, as shards of a size may be remembered
    return lambda: spec.build_metadata(torch.Size([next(rows), 16]), properties)


def gathering(contestant: Contestant, side: int, rank: int) -> Call:
    made = contestant.numbered(side, 0)
    out = torch.zeros(side, side) if rank == 0 else None

    def call() -> None:
        made.gather(0, out)

    call()
    if out is not None and not out.equal(torch.arange(side * side).view(side, side).float()):
        raise ArithmeticError(f"{contestant.package.__name__}: wrong result of gather")
    return call


def resharding(contestant: Contestant, side: int) -> Call:
    """From rows to columns, and at the next call back: the moves are each other's mirror image."""
    made, specs = contestant.numbered(side, 0), [contestant.chunks(1), contestant.chunks(0)]
    turn = 0

    def call() -> None:
        nonlocal turn
        made.reshard(specs[turn % 2])
        turn += 1

    call()
    expected = contestant.numbered(side, 1).local_shards()[0].tensor
    if not made.local_shards()[0].tensor.equal(expected):
        raise ArithmeticError(f"{contestant.package.__name__}: wrong result of reshard")
    return call


def exchange(count: int, fresh: bool = False) -> Call:
    """All bytes of a tensor between all ranks, in equal parts, with nothing to pack."""
    source, target = torch.ones(count), torch.zeros(count)

    def call() -> None:
        dist.all_to_all_single(torch.empty(count) if fresh else target, source)

    return call


def measure(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> list[Row]:
    """On one rank, every case. Collective."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reference.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo{ranks}", rank=rank, world_size=ranks
    )
    rows = []
    side, small = int((options.mib * MIB / 4) ** 0.5), 128
    for case, (nbytes, calls) in cases(side, small, rank, ranks).items():
        taken = by_turns(calls, options.rounds, options.seconds)
        extra = {name: grown(call) for name, call in calls.items() if nbytes >= MIB}
        rows.append(Row(case, ranks, nbytes, taken, extra))
    reference.destroy_process_group()
    return rows


def by_turns(calls: dict[str, Call], rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds of a call, by contestant: the median."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            count = affordable(call, seconds)
            for _ in range(count):
                dist.barrier()
                begun = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - begun)
    return {name: 1e6 * statistics.median(times) for name, times in taken.items()}


def affordable(call: Call, seconds: float) -> int:
    """How many calls fit, as rank 0 sees it."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    count = torch.tensor([int(seconds / (time.perf_counter() - begun))])
    dist.broadcast(count, 0)
    return min(MOST_CALLS, max(2, int(count)))


def grown(call: Call) -> float:
    """By how many MiB this process grew at most during a call."""
    call()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    call()
    after = resident("VmHWM")
    dist.barrier()
    return (after - before) / 1024


def resident(name: str) -> int:
    """KiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def combine(by_rank: list[list[Row]]) -> list[Row]:
    """The slowest and the largest rank count."""
    rows = []
    for same in zip(*by_rank, strict=True):
        most = {name: max(row.microseconds[name] for row in same) for name in same[0].microseconds}
        extra = {name: max(row.extra_mib[name] for row in same) for name in same[0].extra_mib}
        rows.append(Row(same[0].case, same[0].ranks, same[0].bytes, most, extra))
    return rows


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // 1024} KiB"


def show(rows: list[Row], console: Console) -> Chart:
    table = Table(title="Microseconds a call; MiB that a process grows by meanwhile")
    table.add_column("case", no_wrap=True)
    for column in ("ranks", TILEWORK, GLOO, "x", BARE, "rate", FRESH, "rate", "MiB", "Gloo: MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        times, extra = row.microseconds, row.extra_mib
        table.add_row(
            row.case,
            str(row.ranks),
            f"{times[TILEWORK]:,.0f}",
            f"{times[GLOO]:,.0f}",
            f"{times[GLOO] / times[TILEWORK]:.1f}",
            *(text for name in (BARE, FRESH) for text in against(times, name)),
            *(f"{extra[name]:.1f}" if extra else "-" for name in (TILEWORK, GLOO)),
        )
    console.print(table)
    drawn = chart(table, (TILEWORK, GLOO, BARE, FRESH), labels=2)
    return replace(drawn, title="Microseconds a call")


def against(times: dict[str, float], name: str) -> tuple[str, str]:
    """A bare exchange's time, and which share of its rate tilework reaches."""
    if name not in times:
        return "-", "-"
    return f"{times[name]:,.0f}", f"{100 * times[name] / times[TILEWORK]:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharded tensors against torch's on Gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=64, help="size of the large tensor")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each gets")
    parser.add_argument("--seconds", type=float, default=0.1, help="what a turn may take")
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in options.ranks:
            rows += combine(
                run_ranks(n, measure, n, folder, options, kind="processes", timeout=LIMIT)
            )
    console = Console()
    console.width = max(console.width, 120)  # a table in a file is not squeezed
    draw(options.plot, show(rows, console))
    if options.json is not None:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        report = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
