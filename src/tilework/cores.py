"""Numbers of cores that this process may use, and of threads for each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

#: What numerical libraries read for their number of threads when they are loaded.
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
