"""``tilework doctor``: what this machine has, what works, and why something does not."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch

import tilework.distributed as dist
from tilework import huge_pages
from tilework.comm.backends.internal import core_error, is_backend_available, torch_has
from tilework.comm.backends.machine import (
    SINGLE_COPY_VARIABLE,
    cache_sizes,
    host_calibration,
    host_facts,
    read_ranges,
)
from tilework.cores import cpu_quota, host_topology, usable_cores
from tilework.launch.binding import bound_sets
from tilework.plan import measured_here
from tilework.show import Page, TextTable, bytes_text
from tilework.testing import run_ranks

_TEST_RANKS: Final = 2
_TEST_TIMEOUT: Final = timedelta(seconds=10)
#: (name, float32 items, calls) of the self-test's timings; the calls must agree on all ranks.
_TEST_SIZES: Final = (("8 bytes", 2, 100), ("4 MiB", 1 << 20, 10))

State = Literal["yes", "no", "bad"]
Kind = Literal["threads", "processes"]


@dataclass(frozen=True)
class ReportLine:
    """A line of the report of ``tilework doctor``."""

    name: str
    """The thing that was tried."""
    value: str
    """The result in words."""
    state: State = "yes"
    """``no``: absent, which is not a fault; ``bad``: should work and does not."""
    note: str = ""
    """A note, or the next step."""


def doctor() -> int:
    """Print the report, and return 1 if something that should work does not, else 0.

    Blocks for about two seconds; starts two processes, which have ended when it returns.
    """
    sections = {
        "This machine": machine(),
        "Backends": backends(),
        "Self-test": self_test(),
        "Large tensors": data_movement(),
    }
    show_report(sections)
    return int(any(f.state == "bad" for findings in sections.values() for f in findings))


def machine() -> list[ReportLine]:
    """Lines of the report on versions, cores, memory, GPUs, and the shared-memory core."""
    return [
        ReportLine("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ReportLine("Python", f"{platform.python_version()} ({sys.executable})"),
        ReportLine("torch", str(torch.__version__)),
        _cores(),
        _binding(),
        _memory(),
        _gpus(),
        _core(),
    ]


def backends() -> list[ReportLine]:
    """Lines of the report on backends: those that can be used here, and why others cannot."""
    findings = [ReportLine("threads", "ranks are threads of one process"), _shm(), _hybrid()]
    for name in ("gloo", "nccl", "ucc", "mpi"):
        if is_backend_available(name) and not torch_has(name):
            findings.append(ReportLine(name, "on mpi4py: start ranks with its mpirun, or srun"))
        elif is_backend_available(name):
            idle = name == "nccl" and not torch.cuda.is_available()
            value = "in torch, but there is no GPU for it" if idle else "torch's own engine"
            findings.append(ReportLine(name, value, "no" if idle else "yes"))
        else:
            findings.append(ReportLine(name, "not in this build of torch", "no", _HOW_TO_GET[name]))
    return findings


_HOW_TO_GET: Final = {
    "gloo": "torch from PyPI has it",
    "nccl": "for NVIDIA GPUs: install a build of torch for CUDA",
    "ucc": "build torch with USE_UCC=1",
    "mpi": "pip install tilework[mpi], and an MPI",
}


def self_test() -> list[ReportLine]:
    """Lines of the report on a test: two ranks reduce a tensor, as threads and as processes.

    Processes are left out if the shared-memory core cannot be loaded.
    """
    kinds: list[Kind] = ["threads"]
    if core_error() is None:
        kinds.append("processes")
    return [_try(kind) for kind in kinds]


def data_movement() -> list[ReportLine]:
    """Lines of the report on the ways in which processes here exchange large tensors."""
    if core_error() is not None:
        return [ReportLine("calibration", "needs the shared-memory core", "no")]
    topology = ReportLine("topology", str(host_topology()))
    return [_single_copy(), _calibration(), _huge_pages(), topology]


def _single_copy() -> ReportLine:
    """The line of the report on single copy: if processes here can read each other's memory."""
    name = "single copy"
    try:
        how = run_ranks(_TEST_RANKS, _how_it_reads, kind="processes", timeout=_TEST_TIMEOUT)[0]
    except Exception as error:  # as in _try
        return ReportLine(name, "not known", "no", _first_line(error))
    can, ranges = how
    if not can.startswith("possible"):
        note = "Large tensors move in two copies, through memory that ranks share."
        if "Operation not permitted" in can:
            note += " (The kernel's Yama, a container's seccomp, or another user forbids it.)"
        return ReportLine(name, can, "no", note)
    used = [f"{what} {_range(*ends)}" for what, ends in ranges.items() if ends[0] < ends[1]]
    if used:
        return ReportLine(name, f"used: {', '.join(used)}", note=can)
    return ReportLine(name, f"not used: {_why_not_read()}", "no", can)


def _why_not_read() -> str:
    if os.environ.get(SINGLE_COPY_VARIABLE, "").lower() in ("0", "off"):
        return f"turned off, by {SINGLE_COPY_VARIABLE}"
    measured = any(way == "single copy" for _, _, way, _ in host_calibration().measurements)
    return "two copies were measured to be faster here" if measured else "nothing is measured yet"


def _how_it_reads(rank: int) -> tuple[str, dict[str, tuple[int, int]]]:
    """On each of two ranks: if it reads the other's memory, and from and to which sizes."""
    group: Any = dist.get_default_group()
    core = group.engine.group
    for _ in range(3):
        dist.barrier()  # ranks try each other's memory with the second operation
    return core.single_copy(), read_ranges(core.tunables())


def _calibration() -> ReportLine:
    known = host_calibration()
    caches = ", ".join(f"{level} {size}" for level, size in cache_sizes().items())
    note = f"{known.sureness or 'nothing is known'}; caches of data: {caches or 'unknown'}"
    return ReportLine("calibration", known.origin, note=note)


def _huge_pages() -> ReportLine:
    """The line of the report on huge pages of tensors, and of memory that ranks share."""
    policy, shared = huge_pages.offered(), huge_pages.offered("shmem_enabled")
    note = f"The kernel's policies: {policy or 'none'}; for memory that ranks share, {shared}."
    if huge_pages.in_tensors():
        return ReportLine("huge pages", "in large tensors", note=note)
    can = policy == "madvise"
    how = "tilework run --huge-pages" if can else "the kernel gives none to tensors"
    return ReportLine("huge pages", f"not used: {how}", "no", note)


def calibrate() -> int:
    """Measure again which ways of moving data are fast here; keep and print the result.

    Returns the exit status of the command.
    """
    if core_error() is not None:
        print(f"tilework doctor: there is nothing to calibrate: {core_error()}", file=sys.stderr)
        return 1
    known = host_calibration(remake=True)
    rows = [
        (operation, _size(n), way, f"{s * 1e6:,.1f}") for operation, n, way, s in known.measurements
    ]
    _print_table("measured on two ranks", ("operation", "bytes", "way", "µs"), rows)
    chosen = [
        (name, f"{value:,}" if name.endswith("_ns") else _size(value))
        for name, value in known.tunables.items()
        if name != "threads_apart"
    ]
    _print_table("chosen", ("tunable", "value"), chosen)
    for name, value in host_facts().items():
        print(f"{name}: {value}")
    print(f"{known.origin}; {known.sureness}")
    return 0


def describe(path: Path) -> int:
    """Measure what a rank on this machine does, and write it for ``tilework plan``.

    Returns the exit status of the command.
    """
    messages = () if core_error() is not None else host_calibration().measurements
    cluster = measured_here(messages)
    cluster.write(path)
    print(f"wrote {path}: {cluster}")
    return 0


def _size(nbytes: int) -> str:
    return "never" if nbytes >= 1 << 40 else bytes_text(nbytes)


def _range(first: int, end: int) -> str:
    return f"from {_size(first)} " + ("on" if _size(end) == "never" else f"to below {_size(end)}")


def _print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    numbers = {at for at, head in enumerate(heads) if head in ("bytes", "µs", "value")}
    Page((title, "bold"), TextTable(heads, rows, numbers), "").print()


def _try(kind: Kind) -> ReportLine:
    name, began = f"{_TEST_RANKS} {kind}", time.monotonic()
    try:
        figures = _reduce_on(kind)
    except Exception as error:  # the user wants to know any error
        return failed(name, error)
    return ReportLine(name, f"passed in {time.monotonic() - began:.1f} s", note=figures)


def failed(name: str, error: Exception) -> ReportLine:
    """The line of the report on a test that raised ``error``."""
    return ReportLine(name, "failed", "bad", _first_line(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def _reduce_on(kind: Kind) -> str:
    times = run_ranks(_TEST_RANKS, _reduce, kind=kind, timeout=_TEST_TIMEOUT)[0]
    sizes = (name for name, *_ in _TEST_SIZES)
    return "all_reduce of " + ", of ".join(
        f"{size} in {median * 1e6:,.0f} µs (the first call {first * 1e6:,.0f})"
        for size, (first, median) in zip(sizes, times, strict=True)
    )


def _reduce(rank: int) -> list[tuple[float, float]]:
    """(seconds of the first call, median of later calls) of an all_reduce of each test size."""
    return [seconds_for(rank, _TEST_RANKS, items, calls) for _, items, calls in _TEST_SIZES]


def seconds_for(rank: int, ranks: int, items: int, calls: int) -> tuple[float, float]:
    """Seconds of the first all_reduce of ``items`` floats, and the median of ``calls`` others.

    Raises RuntimeError if the sum is wrong. Collective.
    """
    tensor = torch.full((items,), float(rank + 1))
    first = _seconds(tensor)
    expected = ranks * (ranks + 1) // 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"the sum of ranks is wrong: {tensor[:4].tolist()}, not {expected}")
    return first, statistics.median(_seconds(tensor) for _ in range(calls))


def _seconds(tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - began


def _cores() -> ReportLine:
    total, usable = os.cpu_count() or 1, usable_cores()
    quota = cpu_quota()
    why = f"a control group allows {quota:g} cores' time" if quota is not None else ""
    if usable < total and not why:
        why = "this process is bound to some of them"
    return ReportLine("cores", f"{usable} usable of {total}", note=why)


def _binding() -> ReportLine:
    """The line of the report on ``tilework run --bind auto`` with as many ranks as cores."""
    cores = len(host_topology().cores)
    with bound_sets("auto", cores) as sets:
        if sets:
            return ReportLine("binding", f"--bind auto gives each of {cores} ranks a separate core")
    why = "another job has some CPUs, or a control group grants less than all their time"
    if not hasattr(os, "sched_setaffinity"):
        why = "this system cannot bind processes"
    return ReportLine("binding", "--bind auto leaves ranks on any CPU", "no", why)


def _memory() -> ReportLine:
    total, available = _memory_bytes()
    text = f"{total / 2**30:.1f} GiB" if total else "unknown"
    return ReportLine(
        "memory", text, note=f"{available / 2**30:.1f} GiB available" if available else ""
    )


def _memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of this machine's memory; 0 where unknown."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[f"Mem{name}"].split()[0]) for name in ("Total", "Available"))
        return total << 10, available << 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    except (OSError, ValueError, AttributeError):
        return 0, 0


def _gpus() -> ReportLine:
    if not torch.cuda.is_available():
        return ReportLine("GPUs", "none that torch can use", "no")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ReportLine("GPUs", ", ".join(names))


def _core() -> ReportLine:
    name, missing = "shared-memory core", core_error()
    if missing is not None:
        return ReportLine(name, "not here", "no", missing)
    try:
        importlib.import_module("tilework._core")
    except ImportError as error:
        return ReportLine(name, "cannot be loaded", "bad", f"{error}; install tilework again")
    return ReportLine(name, "built")


def _shm() -> ReportLine:
    core = _core()
    if core.state == "yes":
        return ReportLine("shm", "ranks are processes of this machine; the default")
    return ReportLine("shm", "needs the shared-memory core", "no")


def _hybrid() -> ReportLine:
    if _core().state != "yes":
        return ReportLine("hybrid", "needs the shared-memory core", "no")
    if not is_backend_available("gloo"):
        return ReportLine("hybrid", "needs gloo between hosts", "no", _HOW_TO_GET["gloo"])
    return ReportLine("hybrid", "shm within hosts, gloo between them; the default across hosts")


_MARKS: Final[dict[State, str]] = {"yes": "[green]✓[/]", "no": "[dim]-[/]", "bad": "[bold red]✗[/]"}


def show_report(sections: Mapping[str, Sequence[ReportLine]]) -> None:
    """Print a report, as a table with a section for each title."""
    # Slow to import, and only this function draws.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="tilework doctor", show_header=False, title_justify="left")
    for _ in range(4):
        table.add_column(overflow="fold")
    for title, findings in sections.items():
        table.add_section()
        for position, finding in enumerate(findings):
            note = f"\n[dim]{escape(finding.note)}[/]" if finding.note else ""
            table.add_row(
                f"[bold]{title}[/]" if position == 0 else "",
                escape(finding.name),
                _MARKS[finding.state],
                escape(finding.value) + note,
            )
    Console().print(table)
