"""The host's topology: which CPUs share a core, and which a memory node; and what follows from it.

:func:`read_topology` asks the kernel, :func:`plan_for` is pure. The model and its figures are in
docs/algorithms/topology.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tilework.cores import affinity

#: Nanoseconds in which a cache line comes from another core, within and between memory nodes.
NEAR_NS, FAR_NS = 60.0, 200.0
#: Nanoseconds that each reader of one line adds for the next, and lines that a core awaits at once.
READER_NS, AT_ONCE = 20.0, 8
#: Two levels must take at most this share of the flat way's time: the model is not that exact.
_CLEARLY: Final = 0.75
#: A CPU's number is below this, whatever a file says; the kernel's own limit is 8192.
_MOST_CPUS: Final = 1 << 16


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


@dataclass(frozen=True)
class Plan:
    """Sizes and algorithms that serve a group best, by the model.

    Args:
        nodes: Memory nodes that its ranks are on, if they are spread evenly.
        ranks_per_node: On the fullest of them.
        rounds: How ranks learn that all have come. ``"flat"``: each looks at all. ``"by node"``:
            one of each node looks at that node's, then at the other nodes' first.
        long_all_reduce: ``"flat"``: each rank reduces a part of every rank's. ``"by node"``: within
            the nodes first, so that every byte crosses between two nodes once.
        cache_sharers: Ranks that use one second-level cache at the same time.
        chunk_bytes: The most of an outbox that a round should use; 0: no bound is known.
    """

    nodes: int
    ranks_per_node: int
    rounds: Literal["flat", "by node"]
    long_all_reduce: Literal["flat", "by node"]
    cache_sharers: int
    chunk_bytes: int

    def __str__(self) -> str:
        return f"rounds {self.rounds}, long reductions {self.long_all_reduce}"


def plan_for(topology: Topology, ranks: int) -> Plan:
    """The plan for a group.

    Args:
        topology: The host.
        ranks: The group's size.

    Example:
        >>> one_node = Topology((frozenset({0, 1}),), (frozenset({0}), frozenset({1})))
        >>> plan_for(one_node, 2).rounds
        'flat'
    """
    nodes = max(1, min(len(topology.nodes), ranks))
    per_node = -(-ranks // nodes)
    per_core = -(-ranks // max(1, len(topology.cores)))
    by_node = nodes > 1 and two_level_round_ns(nodes, per_node) < _CLEARLY * flat_round_ns(
        nodes, per_node
    )
    # Flat, all but a node's share of each reduction crosses; by node, what one rank has. Ranks
    # alone on their nodes have nothing to save.
    crosses_less = nodes > 1 and per_node > 1
    crowded = ranks > topology.cpus
    # Two threads of a core share its cache. Ranks that take turns on one do so, too, but each
    # finds there what it wrote in its own turn.
    shared = 1 if crowded else per_core
    return Plan(
        nodes,
        per_node,
        "by node" if by_node else "flat",
        "by node" if crosses_less else "flat",
        shared,
        _align_down(topology.second_level_bytes // 2 // shared),
    )


def flat_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round in which every rank looks at all others.

    Example:
        >>> flat_round_ns(1, 2) < flat_round_ns(1, 64) < flat_round_ns(4, 64)
        True
    """
    near, far = ranks_per_node - 1, (nodes - 1) * ranks_per_node
    last = FAR_NS if far else NEAR_NS
    return (near * NEAR_NS + far * FAR_NS) / AT_ONCE + last


def two_level_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round through the first rank of each node.

    Example:
        >>> two_level_round_ns(4, 64) < flat_round_ns(4, 64)
        True
    """
    gather = (ranks_per_node - 1) * NEAR_NS / AT_ONCE + NEAR_NS
    between = (nodes - 1) * FAR_NS / AT_ONCE + FAR_NS
    release = NEAR_NS + ranks_per_node * READER_NS
    return gather + between + release


def _align_down(nbytes: int) -> int:
    return nbytes // 4096 * 4096


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
