"""Geometry: validating boxes against torch's own check, building tilings, planning one rank's part.

    python benchmarks/layout.py                  # up to 16,384 boxes, 4,096 ranks: a minute or two
    python benchmarks/layout.py --boxes 256 --ranks 64 --rounds 1
    python benchmarks/layout.py --json out.json

Both checks get the same metadata objects and run by turns; only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from plotting import Chart, add_plot_option, chart, draw
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import (
    validate_non_overlapping_shards_metadata,
)

from tilework.layout import (
    Placement,
    Plan,
    Replicate,
    Shard,
    Tiling,
    chunk_tiling,
    find_overlap,
    mesh_tiling,
    plan,
)

Span = tuple[tuple[int, int], tuple[int, int]]
"""Offsets and sizes of a box."""

EXTENT = 1 << 14

T = TypeVar("T")


@dataclass(frozen=True)
class Validated:
    """One arrangement of boxes, checked by both."""

    arrangement: str
    boxes: int
    tilework_seconds: float
    torch_seconds: float

    @property
    def ratio(self) -> float:
        return self.torch_seconds / self.tilework_seconds


@dataclass(frozen=True)
class Planned:
    """One pair of tilings."""

    case: str
    ranks: int
    build_seconds: float
    """Of both tilings."""
    first_seconds: float
    """Of a rank's plan, with the indices that tilings keep."""
    next_seconds: float
    """Of another rank's plan."""
    pieces: int
    """What the rank sends, receives and keeps."""
    collective: str


def grid(rows: int, columns: int) -> list[Span]:
    return [((16 * i, 16 * j), (16, 16)) for i in range(rows) for j in range(columns)]


def guillotine(count: int) -> list[Span]:
    """A square, of which the largest part is cut in two at random until there are so many."""
    rng = random.Random(0)
    parts: list[tuple[int, Span]] = [(0, ((0, 0), (1 << 16, 1 << 16)))]
    while len(parts) < count:
        _, ((y, x), (h, w)) = heapq.heappop(parts)
        at = rng.uniform(0.25, 0.75)
        cut_h, cut_w = (int(h * at), w) if h >= w else (h, int(w * at))
        rest = ((y + cut_h, x), (h - cut_h, w)) if h >= w else ((y, x + cut_w), (h, w - cut_w))
        for part in (((y, x), (cut_h, cut_w)), rest):
            heapq.heappush(parts, (-math.prod(part[1]), part))
    return [part for _, part in parts]


def arrangements(count: int) -> Iterator[tuple[str, list[Span]]]:
    """``count`` boxes, a power of two, in several arrangements."""
    side = 1 << (count.bit_length() - 1) // 2
    irregular = guillotine(count)
    shuffle = random.Random(1).sample
    yield "grid", grid(count // side, side)
    yield "grid, shuffled", shuffle(grid(count // side, side), count)
    yield "grid, 8 rows", grid(8, count // 8)
    yield "grid, 8 columns", grid(count // 8, 8)
    yield "irregular", irregular
    yield "irregular, shuffled", shuffle(irregular, count)
    yield "irregular, one missing", shuffle(irregular, count)[1:]
    yield "irregular, half missing", shuffle(irregular, count // 2)
    yield "rows", grid(count, 1)
    yield "rows, shuffled", shuffle(grid(count, 1), count)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and the result."""
    gc.collect()
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def validate(name: str, boxes: list[Span], rounds: int) -> Validated:
    shards = [ShardMetadata(list(o), list(s), f"rank:{i}/cpu") for i, (o, s) in enumerate(boxes)]

    def ours() -> None:
        sizes = [shard.shard_sizes for shard in shards]
        assert find_overlap([shard.shard_offsets for shard in shards], sizes) is None

    def theirs() -> None:
        validate_non_overlapping_shards_metadata(shards)

    both = [(timed(ours)[0], timed(theirs)[0]) for _ in range(rounds)]
    our_times, their_times = zip(*both, strict=True)
    medians = statistics.median(our_times), statistics.median(their_times)
    return Validated(name, len(boxes), *medians)


def mesh(rows: int, columns: int) -> list[list[int]]:
    return [[i * columns + j for j in range(columns)] for i in range(rows)]


#: Two tilings of a square with this side.
Make = Callable[[int], tuple[Tiling, Tiling]]


def pairs(ranks: int) -> Iterator[tuple[str, Make]]:
    """From what to what, for so many ranks, a power of four."""
    side = math.isqrt(ranks)
    square, flat, line = mesh(side, side), mesh(side // 2, 2 * side), range(ranks)
    rows, columns, copies = Shard(0), Shard(1), Replicate()

    def on(ranks_of: list[list[int]], *placed: Placement) -> Callable[[int], Tiling]:
        return lambda extent: mesh_tiling((extent, extent), ranks_of, placed)

    def chunks(dim: int, owners: Sequence[int] = line) -> Callable[[int], Tiling]:
        return lambda extent: chunk_tiling((extent, extent), dim, owners)

    def pair(source: Callable[[int], Tiling], target: Callable[[int], Tiling]) -> Make:
        return lambda extent: (source(extent), target(extent))

    yield "2-D, another mesh", pair(on(square, rows, columns), on(flat, rows, columns))
    yield "2-D, axes swapped", pair(on(square, rows, columns), on(square, columns, rows))
    yield "2-D to rows", pair(on(square, rows, columns), on(square, rows, copies))
    yield "rows, reversed", pair(chunks(0), chunks(0, line[::-1]))
    yield "rows to columns", pair(chunks(0), chunks(1))
    yield "the same, copies", pair(on(square, rows, copies), on(square, columns, copies))
    yield "copies to none", pair(on(square, rows, copies), chunks(1))
    yield "rows to all", pair(chunks(0), on(square, copies, copies))


def planned(name: str, ranks: int, make: Make, rounds: int) -> Planned:
    # Each round has another shape: what is known of equal tilings does not help it.
    seen = [plan_once(make, EXTENT + number, ranks // 3) for number in range(rounds)]
    times = zip(*(taken for taken, _ in seen), strict=True)
    build, first, following = (statistics.median(column) for column in times)
    one = seen[0][1]
    pieces = len(one.sends) + len(one.receives) + len(one.keeps)
    return Planned(name, ranks, build, first, following, pieces, one.collective.kind)


def plan_once(make: Make, extent: int, rank: int) -> tuple[tuple[float, float, float], Plan]:
    """Seconds of building, of one rank's plan, and of the next one's; and the plan."""
    build, (source, target) = timed(lambda: make(extent))
    first, one = timed(lambda: plan(source, target, rank))
    following, _ = timed(lambda: plan(source, target, rank + 1))
    return (build, first, following), one


def show(validated: list[Validated], plans: list[Planned]) -> tuple[Chart, Chart]:
    console = Console()
    table = Table(title="No two boxes overlap: milliseconds, metadata objects to answer")
    table.add_column("arrangement")
    for column in ("boxes", "tilework", "torch", "x"):
        table.add_column(column, justify="right")
    for v in validated:
        ours, theirs = f"{v.tilework_seconds * 1e3:.2f}", f"{v.torch_seconds * 1e3:.2f}"
        table.add_row(v.arrangement, f"{v.boxes:,}", ours, theirs, f"{v.ratio:.1f}")
    console.print(table)
    validation = table
    table = Table(title="One rank's plan: milliseconds (tilings: building both)")
    table.add_column("from what to what")
    for column in ("ranks", "tilings", "first", "next", "pieces"):
        table.add_column(column, justify="right")
    table.add_column("collective")
    for p in plans:
        times = [f"{s * 1e3:.2f}" for s in (p.build_seconds, p.first_seconds, p.next_seconds)]
        table.add_row(p.case, f"{p.ranks:,}", *times, f"{p.pieces:,}", p.collective)
    console.print(table)
    return chart(validation, ("tilework", "torch"), labels=2), chart(table, ("first", "next"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Geometry of sharded tensors, timed.")
    parser.add_argument("--boxes", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--ranks", type=int, default=4096, help="a power of four")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure there")
    add_plot_option(parser)
    options = parser.parse_args()
    console = Console(stderr=True)
    fields = [field for count in options.boxes for field in arrangements(count)]
    validated = [
        validate(*field, options.rounds)
        for field in track(fields, "validating", console=console, transient=True)
    ]
    cases = list(pairs(options.ranks))
    plans = [
        planned(name, options.ranks, make, options.rounds)
        for name, make in track(cases, "planning", console=console, transient=True)
    ]
    draw(options.plot, *show(validated, plans))
    if options.json is not None:
        machine = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        }
        report = {
            "machine": machine,
            "validation": [asdict(v) | {"ratio": v.ratio} for v in validated],
            "plans": [asdict(p) for p in plans],
        }
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
