"""The cores that this process may use, their memory nodes, and the threads for each rank."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: What numerical libraries read for their number of threads when they are loaded.
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: A CPU's number is below this, whatever a file says; the kernel's own limit is 8192.
_MOST_CPUS: Final = 1 << 16


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """The number of CPUs in this process's affinity, or of ``cpus``, at most the CPU quota of the
    control group. Tests give another ``root`` of ``proc`` and ``sys``.
    """
    cores = len(affinity() if cpus is None else cpus)
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> frozenset[int]:
    """The numbers of the CPUs that this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return frozenset(range(os.cpu_count() or 1))


def has_spare_core(ranks: int) -> bool:
    """True if this host has at least two usable cores for each rank on it: LOCAL_WORLD_SIZE ranks,
    or ``ranks`` where the environment does not say.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return usable_cores() >= 2 * (int(told) if told.isdecimal() else ranks)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's control groups, in cores (2.5); None: no quota."""
    limits = [limit for folder in _cgroup_folders(root) if (limit := _limit_in(folder)) is not None]
    return min(limits, default=None)


def threads_per_rank(ranks: int, environment: Mapping[str, str]) -> int | None:
    """The number of threads for each of this host's ``ranks`` ranks.

    None if ``environment`` sets OMP_NUM_THREADS: the user has chosen.
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    return max(1, usable_cores() // ranks)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups that may hold a CPU quota, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = (base, base / "unified")
        elif "cpu" in controllers.split(","):
            mounts = (base / controllers, base / "cpu")
        else:
            continue
        inner = Path(path.lstrip("/"))
        # In a container the path may be the host's; the mount's root is then the group itself.
        for mount in mounts:
            for part in (inner, *inner.parents):
                yield mount / part


def _limit_in(folder: Path) -> float | None:
    """The CPU quota, in cores, of one control group's folder (version 1 or 2); None: no quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()  # version 2: "max" is no limit
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text()  # version 1: -1 is no limit
            period = (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return limit if limit > 0 else None


# -- topology --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """The CPUs that this process may use, grouped by memory node and by core.

    Args:
        nodes: The CPU numbers of each memory node; no node is empty.
        cores: The CPU numbers of each core: several numbers if a core runs several threads.
        second_level_bytes: The size of a core's second-level cache; 0 if unknown.
    """

    nodes: tuple[frozenset[int], ...]
    cores: tuple[frozenset[int], ...]
    second_level_bytes: int = 0

    @property
    def cpus(self) -> int:
        """The number of CPUs."""
        return sum(map(len, self.nodes))

    def __str__(self) -> str:
        nodes = f"{len(self.nodes)} memory node" + ("s" if len(self.nodes) > 1 else "")
        threads = max(map(len, self.cores), default=1)
        each = f" of {threads} threads" if threads > 1 else ""
        return f"{len(self.cores)} cores{each} on {nodes}"


def read_topology(root: Path = Path("/"), usable: Iterable[int] | None = None) -> Topology:
    """The topology of the CPUs ``usable`` (None: this process's affinity), read from sysfs below
    ``root``.

    If sysfs does not show a CPU's core, the CPU is a core by itself; CPUs without a memory node
    there are on one node.
    """
    system = root / "sys/devices/system"
    cpus = frozenset(affinity() if usable is None else usable)
    online = _read_list(system / "cpu/online")
    cpus = cpus & online or cpus
    nodes = _groups(cpus, (_read_list(f / "cpulist") for f in _numbered(system / "node", "node")))
    cores = _groups(cpus, (_siblings(folder) for folder in _numbered(system / "cpu", "cpu")))
    caches = (_second_level_bytes(system / f"cpu/cpu{cpu}/cache") for cpu in sorted(cpus))
    # CPUs of which no node is known are on one of their own.
    known = frozenset[int]().union(*nodes)
    rest = (cpus - known,) if cpus - known else ()
    threads = frozenset[int]().union(*cores)
    singles = tuple(frozenset({cpu}) for cpu in sorted(cpus - threads))
    return Topology((*nodes, *rest), (*cores, *singles), next(filter(None, caches), 0))


def host_topology(usable: frozenset[int] | None = None) -> Topology:
    """The topology of this host, limited to ``usable`` (None: this process's affinity); read once
    for each set of CPUs.
    """
    return _known_topology(affinity() if usable is None else usable)


@functools.cache
def _known_topology(usable: frozenset[int]) -> Topology:
    return read_topology(usable=usable)


def _numbered(folder: Path, name: str) -> Iterator[Path]:
    """The folders in ``folder`` named ``name`` and a number (``cpu0``, ``cpu1``), by number."""
    found = (p for p in folder.glob(f"{name}[0-9]*") if p.name.removeprefix(name).isdecimal())
    return iter(sorted(found, key=lambda p: int(p.name.removeprefix(name))))


def _siblings(cpu: Path) -> frozenset[int]:
    newer = _read_list(cpu / "topology/core_cpus_list")
    return newer or _read_list(cpu / "topology/thread_siblings_list")


def _groups(cpus: frozenset[int], sets: Iterable[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """Each set, limited to CPUs in ``cpus`` that no earlier set has; empty results are dropped."""
    groups, left = [], set(cpus)
    for members in sets:
        if mine := frozenset(members & left):
            groups.append(mine)
            left -= mine
    return tuple(groups)


def _read_list(path: Path) -> frozenset[int]:
    """The numbers in a file like "0-3,8"; empty if the file is missing or malformed."""
    numbers: set[int] = set()
    try:
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            end = min(int(last or first), _MOST_CPUS) + 1
            numbers.update(range(int(first), end))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(numbers)


def _second_level_bytes(caches: Path) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    for index in _numbered(caches, "index"):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
            if level == "2" and kind != "Instruction":
                return int(size.rstrip("KM")) * units.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return 0
