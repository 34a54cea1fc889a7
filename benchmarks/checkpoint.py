"""Checkpoints against plain files, safetensors and torch.distributed.checkpoint (DCP).

    python benchmarks/checkpoint.py                      # 1 GiB on 2 ranks: about a minute
    python benchmarks/checkpoint.py --ranks 2 4 --mib 1024 --folder /data/tmp
    python benchmarks/checkpoint.py --cold               # reads come from the disk

The same processes run all contestants by turns, on the same bytes and the same disk, all of them
with flushes: only ratios within one run mean much. Each round another one begins, since what one
has replaced the system may free while the next is at work; for the thread on which tilework frees
it, all wait. A time is that of the slowest rank, from a barrier to a barrier; of several rounds the
median counts. Plain files are read by readinto() into memory that was touched before, as all
contestants' is. Where a rank needs columns, "plain files" are as many bytes in one piece, which no
program that needs columns can read so; "pread of each row" are the very bytes, by a call for each.
"Room" is what the memory of a rank grew by while it loaded, at the most, beside what it loads into.
Last comes a step of training by one rank, alone and beside async_save: on two cores or more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as reference
from plotting import Chart, add_plot_option, draw
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh as their_mesh
from torch.distributed.tensor import DTensor as TheirDTensor
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard

import tilework.distributed as dist
from tilework import checkpoint
from tilework.checkpoint.format import Part, SavedTensor
from tilework.checkpoint.load_planning import Wanted, plan_load
from tilework.checkpoint.save_planning import TensorToSave, assign_writers
from tilework.checkpoint.storage import late_close
from tilework.dtensor import DTensor, Replicate, Shard, init_device_mesh
from tilework.layout import Box
from tilework.testing import run_ranks

warnings.simplefilter("ignore")
MIB = 1 << 20
LIMIT = timedelta(minutes=5)
PLAIN, OURS, DCP, SAFETENSORS = "plain files", "tilework", "DCP", "safetensors"
ROWS = "pread of each row"
Call = Callable[[], object]
#: The dim in which a rank has what it loads; None: it has all. Saved is dim 0.
LAYOUTS = {"load, same layout": 0, "load, rows to columns": 1, "load, all of it": None}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor."""
    elements: Any = tensor.numpy()
    return memoryview(elements).cast("B")


class Contest:
    """One rank's states and calls."""

    def __init__(self, rank: int, ranks: int, folder: Path, mib: int, cold: bool) -> None:
        self.rank, self.ranks, self.folder, self.cold = rank, ranks, folder, cold
        torch.set_num_threads(1)
        store = FileStore(str(folder / "store"), ranks)
        reference.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.their_mesh = their_mesh("cpu", (ranks,))
        self.count = max(1, mib // 16)
        self.rows, self.columns = 2048, mib * MIB // 4 // self.count // 2048
        generator = torch.Generator().manual_seed(rank)
        self.locals = [
            torch.rand(self.rows // ranks, self.columns, generator=generator)
            for _ in range(self.count)
        ]

    def state(self, locals_: list[torch.Tensor], dim: int | None = 0) -> dict[str, Any]:
        placement = [Replicate() if dim is None else Shard(dim)]
        return {f"t{n}": DTensor.from_local(x, self.mesh, placement) for n, x in enumerate(locals_)}

    def their_state(self, locals_: list[torch.Tensor], dim: int | None = 0) -> dict[str, Any]:
        placement = [TheirReplicate() if dim is None else TheirShard(dim)]
        return {
            f"t{n}": TheirDTensor.from_local(x, self.their_mesh, placement)
            for n, x in enumerate(locals_)
        }

    def memory(self, dim: int | None) -> list[torch.Tensor]:
        """Memory for what a rank has in a layout, touched."""
        shape = [self.rows, self.columns]
        if dim is not None:
            shape[dim] //= self.ranks
        return [torch.zeros(*shape) for _ in range(self.count)]

    # -- saving ------------------------------------------------------------------------------

    def saves(self) -> dict[str, Call]:
        ours, theirs = self.state(self.locals), self.their_state(self.locals)
        own = {f"t{n}": x for n, x in enumerate(self.locals)}

        def plain() -> None:
            (self.folder / "plain").mkdir(exist_ok=True)
            with open(self.folder / "plain" / f"{self.rank}.part", "wb", buffering=0) as file:
                for x in self.locals:
                    view = bytes_of(x)
                    while view.nbytes:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.replace(file.name, self.folder / "plain" / str(self.rank))
            flush(self.folder / "plain")

        def safetensors() -> None:
            path = self.folder / f"{self.rank}.safetensors"
            save_file(own, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            flush(self.folder)

        def ours_() -> None:
            checkpoint.save(ours, self.folder / "ours")

        def theirs_() -> None:
            save_dcp(theirs, storage_writer=FileSystemWriter(self.folder / "dcp"))

        return {PLAIN: plain, OURS: ours_, DCP: theirs_, SAFETENSORS: safetensors}

    # -- loading -----------------------------------------------------------------------------

    def loads(self, dim: int | None) -> dict[str, Call]:
        memory = self.memory(dim)
        ours, theirs = self.state(memory, dim), self.their_state(memory, dim)
        # Of the same bytes as this rank needs: its own file, or all of them.
        files = range(self.ranks) if dim is None else [self.rank]

        def plain() -> None:
            views = [bytes_of(x) for x in memory]
            each = views[0].nbytes // len(files)
            for number, rank in enumerate(files):
                with open(self.folder / "plain" / str(rank), "rb", buffering=0) as file:
                    for view in views:
                        left = view[number * each : (number + 1) * each]
                        while left.nbytes:
                            left = left[file.readinto(left) :]

        def ours_() -> None:
            checkpoint.load(self.folder / "ours", into=ours)

        def theirs_() -> None:
            load_dcp(theirs, storage_reader=FileSystemReader(self.folder / "dcp"))

        def rows() -> None:
            """Columns, from files that have rows."""
            width = bytes_of(memory[0][:1]).nbytes
            row, here = width * self.ranks, width * self.rank
            for number in range(self.ranks):
                with open(self.folder / "plain" / str(number), "rb", buffering=0) as file:
                    fd, at = file.fileno(), here
                    for x in memory:
                        view, first = bytes_of(x), number * self.rows // self.ranks * width
                        for start in range(first, first + self.rows // self.ranks * width, width):
                            os.preadv(fd, [view[start : start + width]], at)
                            at += row

        calls: dict[str, Call] = {PLAIN: plain, OURS: ours_, DCP: theirs_}
        return {**calls, ROWS: rows} if dim == 1 else calls

    # -- asynchronous ------------------------------------------------------------------------

    def held(self) -> dict[str, Call]:
        state = self.state(self.locals)
        copies = [torch.empty_like(x) for x in self.locals]

        def copy() -> None:
            for target, x in zip(copies, self.locals, strict=True):
                target.copy_(x)

        pending: list[Any] = []

        def save() -> None:
            pending.append(checkpoint.async_save(state, self.folder / "ours"))

        def wait() -> None:
            while pending:
                pending.pop().wait()

        self.after = wait
        return {"one copy": copy, "async_save": save}

    after: Call = staticmethod(lambda: None)

    def room(self) -> dict[str, int]:
        """MiB that a rank's memory grows by while it loads, for each layout."""
        found = {}
        for name, dim in LAYOUTS.items():
            state = self.state(self.memory(dim), dim)
            before = memory_peak(reset=True)
            checkpoint.load(self.folder / "ours", into=state)
            found[name] = max(0, memory_peak() - before)
        return found

    def by_turns(self, calls: dict[str, Call], rounds: int) -> dict[str, float]:
        """Seconds of each call on the slowest rank, the median of the rounds."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                call = calls[name]
                if self.cold:
                    drop_caches(self.folder)
                dist.barrier()
                begun = time.perf_counter()
                call()
                taken = torch.tensor([time.perf_counter() - begun])
                self.after()
                late_close.wait()
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                if turn:  # the first warms up
                    times[name].append(taken.item())
        return {name: statistics.median(found) for name, found in times.items()}


def memory_peak(*, reset: bool = False) -> int:
    """The most memory that this process had, in MiB, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) // 1024


def beside(rank: int, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of a step alone, and beside async_save, on one rank."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.rand(256, 512)
    state = {"t": [torch.rand(4 * MIB) for _ in range(max(1, options.mib // 16))]}
    times: dict[str, list[float]] = {"a step alone": [], "a step beside async_save": []}

    def step(name: str) -> None:
        begun = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times[name].append(time.perf_counter() - begun)

    for _ in range(options.rounds):
        for _ in range(20):
            step("a step alone")
        pending = checkpoint.async_save(state, folder / "beside")
        while not pending.done():
            step("a step beside async_save")
        pending.wait()
    return {"a step": {name: statistics.median(found) for name, found in times.items()}}


def flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_caches(folder: Path) -> None:
    """Have the system forget what files hold; they are flushed already."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def work(rank: int, ranks: int, folder: Path, options: argparse.Namespace) -> Any:
    """All cases, on one rank."""
    contest = Contest(rank, ranks, folder, options.mib, options.cold)
    rounds = options.rounds
    found: dict[str, dict[str, float]] = {}
    found["save"] = contest.by_turns(contest.saves(), rounds)
    for name, dim in LAYOUTS.items():
        if dim is not None or options.mib * ranks <= 4096:
            found[name] = contest.by_turns(contest.loads(dim), rounds)
    check(contest)
    room = contest.room()
    found["held by async_save"] = contest.by_turns(contest.held(), rounds)
    reference.destroy_process_group()
    return found, room


def check(contest: Contest) -> None:
    """Compare what was loaded in columns with what was saved in rows."""
    memory = contest.memory(1)
    checkpoint.load(contest.folder / "ours", into=contest.state(memory, 1))
    rows = contest.state(contest.locals)["t0"].redistribute(placements=[Shard(1)])
    assert torch.equal(rows.to_local(), memory[0])


def planning() -> dict[str, float]:
    """Seconds to plan: pure, on one core."""

    def tensor(number: int, ranks: int) -> TensorToSave:
        tiles = tuple((Box((64 * r, 0), (64, 64)), (r,)) for r in range(ranks))
        return TensorToSave(f"layers.{number}", "F32", (64 * ranks, 64), tiles)

    def best(function: Call) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
        return min(times)

    thousand = [tensor(n, 64) for n in range(1000)]
    many = [tensor(n, 64) for n in range(1563)]
    wanted = [
        Wanted(
            SavedTensor(
                t.name, "F32", t.shape, tuple(Part(b, "f", 0, 16384, (0,)) for b, _ in t.tiles)
            ),
            t.tiles,
        )
        for t in many
    ]
    return {
        "save, 1,000 tensors on 64 ranks": best(lambda: assign_writers(thousand, range(64))),
        "save, 100,000 boxes": best(lambda: assign_writers(many, range(64))),
        "load, 100,000 boxes": best(lambda: plan_load(wanted, range(64), 3, MIB)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--cold", action="store_true", help="drop caches before each call")
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    figures: dict[str, Any] = {"planning": planning()}
    charts = []
    for name, seconds in figures["planning"].items():
        print(f"{name}: {seconds * 1000:.0f} ms")
    for ranks in options.ranks:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            found, room = run_ranks(
                ranks, work, ranks, folder, options, kind="processes", timeout=LIMIT
            )[0]
            figures[f"{ranks} ranks"] = {**found, "room": room}
        finally:
            shutil.rmtree(folder)
        Console(width=110).print(table(found, ranks, options))
        charts.append(Chart(f"{options.mib} MiB on {ranks} ranks: seconds", list(found.items())))
        print("room, in MiB:", ", ".join(f"{name}: {mib}" for name, mib in room.items()))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        found = run_ranks(1, beside, folder, options, kind="processes", timeout=LIMIT)[0]
    finally:
        shutil.rmtree(folder)
    figures["beside"] = found
    Console(width=110).print(table(found, 1, options))
    charts.append(Chart(f"{options.mib} MiB on 1 rank: seconds", list(found.items())))
    draw(options.plot, *charts)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def table(found: dict[str, dict[str, float]], ranks: int, options: argparse.Namespace) -> Table:
    shown = Table(title=f"{options.mib} MiB on {ranks} ranks{', cold' if options.cold else ''}")
    shown.add_column("")
    for name in ("first", "ours", "of the first's rate", "others"):
        shown.add_column(name, justify="right")
    for case, times in found.items():
        (first, seconds), (_, ours), *others = times.items()
        rest = ", ".join(f"{n} {t:.3f} s ({t / ours:.2f}x)" for n, t in others)
        shown.add_row(
            case, f"{first} {seconds:.3f} s", f"{ours:.3f} s", f"{seconds / ours:.0%}", rest
        )
    return shown


if __name__ == "__main__":
    main()
