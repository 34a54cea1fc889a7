"""Ranks on separate CPUs: the CPUs of each rank, and the CPUs that another job of the user has.

:func:`sets_for` is pure. A job holds CPUs by file locks, one byte of a file for each CPU. The
launcher owns the locks, not the ranks: they end with the launcher, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Final, Literal, TypeVar

from tilework.cores import Topology, cpu_quota, read_topology

if sys.platform != "win32":
    import fcntl

BindMode = Literal["auto", "numa", "cores", "none"]
CpuSets = tuple[frozenset[int], ...]

T = TypeVar("T")
_LOCKS: Final = "tilework-cpus"


def sets_for(mode: BindMode, ranks: int, topology: Topology) -> CpuSets:
    """The CPUs for each of this host's ranks, in their order; empty: ranks are not bound. Pure.

    ``cores``: each rank has CPUs that no other rank has, all on one memory node if there are at
    least as many ranks as nodes; ``numa``: all CPUs of a memory node; ``auto``: as ``cores`` if
    there are enough cores. Raises ValueError for ``cores`` with fewer cores than ranks.
    """
    cores = len(topology.cores)
    if mode == "none" or (mode == "auto" and ranks > cores):
        return ()
    if mode == "cores" and ranks > cores:
        raise ValueError(
            f"{ranks} ranks cannot be bound to cores of their own, as there are {cores}: start "
            f"fewer, or leave out --bind"
        )
    nodes = [[core for core in topology.cores if core <= node] for node in topology.nodes]
    if ranks <= len(nodes):
        return tuple(_joined(list(chain(*each))) for each in _shares(nodes, ranks))
    sets: list[frozenset[int]] = []
    for node, count in zip(nodes, _counts(ranks, [len(node) for node in nodes]), strict=True):
        shares = [node] * count if mode == "numa" or not count else _shares(node, count)
        sets += [_joined(share) for share in shares]
    return tuple(sets)


def _joined(cores: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*cores)


def _shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    ends = [len(items) * number // count for number in range(count + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def _counts(ranks: int, cores: Sequence[int]) -> list[int]:
    """The number of ranks on each memory node; ``cores`` has the number of cores of each node."""
    counts = [0] * len(cores)
    for _ in range(ranks):
        counts[max(range(len(cores)), key=lambda n: (cores[n] / (counts[n] + 1), -counts[n]))] += 1
    return counts


@contextlib.contextmanager
def bound_sets(mode: BindMode, ranks: int, root: Path = Path("/")) -> Iterator[CpuSets]:
    """The CPUs for each rank, held for this job until the block ends; empty: ranks are not bound.

    ``auto`` does not bind ranks if another job of this user holds any of these CPUs, or if a
    control group grants less than the full time of all CPUs, since other processes then work on
    them. Raises as :func:`sets_for`, and OSError if this system cannot bind processes to CPUs.
    ``root``, the folder of ``proc`` and ``sys``, is for tests.
    """
    sets = _wanted(mode, ranks, root)
    with hold(frozenset[int]().union(*sets)) as held:
        yield sets if held or mode != "auto" else ()


def _wanted(mode: BindMode, ranks: int, root: Path) -> CpuSets:
    if not hasattr(os, "sched_setaffinity"):
        if mode in ("auto", "none"):
            return ()
        raise OSError(0, f"this system cannot bind processes to CPUs: leave out --bind {mode}")
    topology = read_topology(root)
    quota = cpu_quota(root)
    if mode == "auto" and quota is not None and quota < topology.cpus:
        return ()
    return sets_for(mode, ranks, topology)


@contextlib.contextmanager
def hold(cpus: Collection[int]) -> Iterator[bool]:
    """Hold ``cpus`` for this process until the block ends.

    Yields False if another process of the user holds any of them, or if they cannot be locked.
    """
    if not cpus:
        yield True
        return
    with contextlib.ExitStack() as stack:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(Path(tempfile.gettempdir(), f"{_LOCKS}-{os.getuid()}"), flags, 0o600)
            stack.callback(os.close, fd)  # ends all locks
            for cpu in cpus:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, cpu)
        except OSError:
            held = False
        else:
            held = True
        yield held


@contextlib.contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Restrict processes that this thread starts in the block to ``cpus``; empty: any CPUs."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
