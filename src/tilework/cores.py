"""The cores that this process may use, on which memory nodes they are, and threads for ranks."""

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
    """Cores this process may run on: its affinity, bounded by its control group's CPU quota.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
        cpus: The CPUs that count, instead of its affinity.

    Example:
        >>> usable_cores() >= 1
        True
    """
    cores = len(affinity() if cpus is None else cpus)
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> frozenset[int]:
    """The numbers of the CPUs that this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # only Linux tells
        return frozenset(range(os.cpu_count() or 1))


def has_spare_core(ranks: int) -> bool:
    """True if each of this host's ranks could have a core besides that on which it computes.

    Args:
        ranks: The ranks of this host, where no launcher told their number.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return usable_cores() >= 2 * (int(told) if told.isdecimal() else ranks)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control group grants; None without a limit."""
    limits = [limit for folder in _cgroup_folders(root) if (limit := _limit_in(folder)) is not None]
    return min(limits, default=None)


def threads_per_rank(ranks: int, environment: Mapping[str, str]) -> int | None:
    """Threads that each of ``ranks`` should use; None where the user set OMP_NUM_THREADS."""
    if environment.get("OMP_NUM_THREADS"):
        return None
    return max(1, usable_cores() // ranks)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The folders of this process's groups that may hold a CPU quota, innermost first."""
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
    """The quota set in one folder, of either version of control groups."""
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
    """The CPUs that this process may use.

    Args:
        nodes: Their numbers, by memory node; no node is empty.
        cores: Their numbers, by core: more than one each where cores run several threads.
        second_level_bytes: A core's second-level cache; 0 where the system does not tell.
    """

    nodes: tuple[frozenset[int], ...]
    cores: tuple[frozenset[int], ...]
    second_level_bytes: int = 0

    @property
    def cpus(self) -> int:
        """The number of CPUs.

        Example:
            >>> Topology((frozenset({0, 1}), frozenset({2})), ()).cpus
            3
        """
        return sum(map(len, self.nodes))

    def __str__(self) -> str:
        nodes = f"{len(self.nodes)} memory node" + ("s" if len(self.nodes) > 1 else "")
        threads = max(map(len, self.cores), default=1)
        each = f" of {threads} threads" if threads > 1 else ""
        return f"{len(self.cores)} cores{each} on {nodes}"


def read_topology(root: Path = Path("/"), usable: Iterable[int] | None = None) -> Topology:
    """The topology that sysfs tells; where it tells nothing, one node of cores with a thread each.

    Args:
        root: Where ``sys`` is; for tests.
        usable: CPUs that count, if they are online; None: this process's affinity.
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
    """This host's, read once for each set of CPUs.

    Args:
        usable: CPUs that count; None: this process's affinity.

    Example:
        >>> host_topology().cpus >= 1
        True
    """
    return _known_topology(affinity() if usable is None else usable)


@functools.cache
def _known_topology(usable: frozenset[int]) -> Topology:
    return read_topology(usable=usable)


def _numbered(folder: Path, name: str) -> Iterator[Path]:
    """The folders of that name and a number, by number."""
    found = (p for p in folder.glob(f"{name}[0-9]*") if p.name.removeprefix(name).isdecimal())
    return iter(sorted(found, key=lambda p: int(p.name.removeprefix(name))))


def _siblings(cpu: Path) -> frozenset[int]:
    newer = _read_list(cpu / "topology/core_cpus_list")
    return newer or _read_list(cpu / "topology/thread_siblings_list")


def _groups(cpus: frozenset[int], sets: Iterable[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """Of each set those in ``cpus`` that no earlier one had; none empty."""
    groups, left = [], set(cpus)
    for members in sets:
        if mine := frozenset(members & left):
            groups.append(mine)
            left -= mine
    return tuple(groups)


def _read_list(path: Path) -> frozenset[int]:
    """The numbers in a file like "0-3,8"; none where it is not there, or holds something else."""
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
