"""The host's calibration: the sizes at which the core changes algorithms.

The core measures the sizes (csrc/collectives/calibration.cpp), once per host. They are kept in the
user's cache folder, keyed by everything they depend on. Files are not trusted: an unreadable file,
or a file for other facts, causes a new measurement. A file appears as a whole or not at all. If no
file can be written, each process that makes groups measures again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tilework.cores import Topology, affinity, host_topology, usable_cores
from tilework.optional_core import core as _core

# The model and its figures are in docs/algorithms/topology.md.

#: Nanoseconds to get a cache line from another core, within and between memory nodes.
NEAR_NS, FAR_NS = 60.0, 200.0
#: Nanoseconds that each reader of a line adds for the next, and the lines that a core awaits at
#: once.
READER_NS, AT_ONCE = 20.0, 8
#: Two levels must take at most this share of the flat way's time: the model is too coarse for
#: smaller gains.
_CLEARLY: Final = 0.75


@dataclass(frozen=True)
class TuningPlan:
    """The best sizes and algorithms for a group, by the model.

    Args:
        nodes: Memory nodes with ranks, if ranks are spread evenly.
        ranks_per_node: Ranks on the fullest node.
        rounds: How ranks learn that all have come. ``"flat"``: each rank looks at all. ``"by
            node"``: one rank of each node looks at that node's ranks, then at the other nodes'
            first ranks.
        long_all_reduce: ``"flat"``: each rank reduces a part of every rank's data. ``"by node"``:
            within the nodes first, so that every byte crosses between two nodes once.
        cache_sharers: Ranks that use the same second-level cache at the same time.
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


def plan_for(topology: Topology, ranks: int) -> TuningPlan:
    """The plan for a group.

    Args:
        topology: The host.
        ranks: The number of ranks of the group.

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
    # Flat, all but a node's share of each reduction crosses; by node, only one rank's amount. A
    # single rank per node has nothing to save.
    crosses_less = nodes > 1 and per_node > 1
    crowded = ranks > topology.cpus
    # Two threads of a core share a cache. Ranks that take turns on a core share it, too, but each
    # rank finds there what it wrote in its own turn.
    shared = 1 if crowded else per_core
    return TuningPlan(
        nodes,
        per_node,
        "by node" if by_node else "flat",
        "by node" if crosses_less else "flat",
        shared,
        _align_down(topology.second_level_bytes // 2 // shared),
    )


def flat_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round in which every rank looks at all others."""
    near, far = ranks_per_node - 1, (nodes - 1) * ranks_per_node
    last = FAR_NS if far else NEAR_NS
    return (near * NEAR_NS + far * FAR_NS) / AT_ONCE + last


def two_level_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round through the first rank of each node."""
    gather = (ranks_per_node - 1) * NEAR_NS / AT_ONCE + NEAR_NS
    between = (nodes - 1) * FAR_NS / AT_ONCE + FAR_NS
    release = NEAR_NS + ranks_per_node * READER_NS
    return gather + between + release


def _align_down(nbytes: int) -> int:
    return nbytes // 4096 * 4096


#: "0" or "off": measure and read nothing; use the core's defaults.
CALIBRATION_VARIABLE: Final = "TILEWORK_CALIBRATION"
#: "1" or "on": wherever possible; "0" or "off": never, also not between threads; else: where
#: measurements show it to be faster.
SINGLE_COPY_VARIABLE: Final = "TILEWORK_SINGLE_COPY"
_OFF, _ON = ("0", "off"), ("1", "on")
_MOVES: Final = ("single_copy_bytes", "single_copy_rooted_bytes", "single_copy_message_bytes")
_BETWEEN_PROCESSES: Final = (*_MOVES, "single_copy_reduce_bytes")
_CHUNKS: Final = ("chunk_bytes", "reduce_chunk_bytes")
_LEAST_CHUNK_BYTES: Final = 64 * 1024
#: The factor by which messages must be longer before ranks that share cores read them directly:
#: that takes one more round, in which each rank has to get a core.
_CROWDED_FACTOR: Final = 4
#: The smallest messages that are read from peers if the user wants that.
_WANTED_FROM_BYTES: Final = 64 * 1024
_MOST_FILE_BYTES: Final = 1 << 16

#: (operation, bytes of each rank, way, seconds).
Measurement = tuple[str, int, str, float]


@dataclass(frozen=True)
class Calibration:
    """Values for all tunables of the core: the sizes at which it changes algorithms, and sizes of
    chunks.

    Args:
        tunables: Sizes in bytes, by name; see csrc/transport/tunables.h.
        measurements: The times that the tunables follow from; empty if nothing was measured.
        origin: The origin of the values, for people.
    """

    tunables: Mapping[str, int]
    measurements: tuple[Measurement, ...]
    origin: str


def group_tunables(
    ranks: int = 2,
    cpus: frozenset[int] | None = None,
    before_measuring: Callable[[], object] | None = None,
) -> dict[str, int]:
    """The tunables for a new group's segment. May measure for some 0.3 s, after
    ``before_measuring`` has waited for a quiet moment. The ranks may use ``cpus`` together (None:
    those of this process).
    """
    cpus = affinity() if cpus is None else cpus
    known = host_calibration(cpus=cpus, before_measuring=before_measuring)
    tunables = chunks_for(plan_for(host_topology(cpus), ranks), known)
    wanted = os.environ.get(SINGLE_COPY_VARIABLE, "").lower()
    if wanted in _ON:
        for name in _BETWEEN_PROCESSES:
            tunables |= {name: _WANTED_FROM_BYTES, below(name): _core.NEVER_BYTES}
    elif wanted in _OFF:
        tunables |= dict.fromkeys((*_BETWEEN_PROCESSES, "thread_copy_bytes"), _core.NEVER_BYTES)
    elif ranks > usable_cores(cpus=cpus):
        # The measurement had a core per rank. On shared cores, outboxes stay in the cache.
        tunables["single_copy_reduce_bytes"] = _core.NEVER_BYTES
        for name in _MOVES:
            tunables[name] = min(_core.NEVER_BYTES, _CROWDED_FACTOR * tunables[name])
    return tunables


def below(name: str) -> str:
    """The name of the tunable for the upper end of a range of sizes; ``name`` is the tunable for
    the lower end.
    """
    return name.removesuffix("_bytes") + "_below_bytes"


def chunks_for(plan: TuningPlan, known: Calibration) -> dict[str, int]:
    """The tunables of ``known``, with sizes of chunks made smaller where, by the plan, ranks share
    a cache.

    Measurements are made with a cache for each rank; without measurements, chunks have at most
    ``plan.chunk_bytes``, too.
    """
    tunables = dict(known.tunables)
    for name in _CHUNKS:
        size = tunables[name] // plan.cache_sharers
        if not known.measurements and plan.chunk_bytes:
            size = min(size, plan.chunk_bytes)
        tunables[name] = min(tunables[name], max(size, _LEAST_CHUNK_BYTES))
    return tunables


_lock = threading.Lock()
_known: dict[str, Calibration] = {}


def host_calibration(
    *,
    cpus: frozenset[int] | None = None,
    remake: bool = False,
    before_measuring: Callable[[], object] | None = None,
) -> Calibration:
    """This host's calibration for some CPUs (None: those of this process): from this process's
    memory, from a file in the cache folder, or measured now (with ``remake`` in any case).
    """
    if os.environ.get(CALIBRATION_VARIABLE, "").lower() in _OFF and not remake:
        return _defaults("turned off, by TILEWORK_CALIBRATION=0")
    cpus = affinity() if cpus is None else cpus
    facts = host_facts(cpus)
    path = cache_folder() / f"calibration-{_digest(facts)}.json"

    def kept() -> Calibration | None:
        return None if remake else _known.get(str(path)) or load(path, facts)

    if before_measuring and usable_cores(cpus=cpus) > 1 and kept() is None:
        before_measuring()  # not under the lock: may wait for ranks that need the lock
    with _lock:  # threads of one process make groups at the same time
        known = kept()
        if known is None:
            known = _measured(path, facts, cpus, patient=not remake)
        _known[str(path)] = known
        return known


def _measured(
    path: Path, facts: Mapping[str, object], cpus: frozenset[int], *, patient: bool
) -> Calibration:
    """Measure, and keep the result in file ``path``. Return default values if measuring fails or,
    with ``patient``, if the host is busy.
    """
    if usable_cores(cpus=cpus) < 2:
        return _defaults("not measured: that takes two cores")
    with _alone(path) as alone:
        if patient and not alone:
            return _defaults("not measured: another process was measuring")
        try:
            tunables, measurements = _core.calibrate(sorted(cpus), insists=not patient)
        except (OSError, RuntimeError) as error:
            return _defaults(f"not measured: {error}")
    kept = save(path, facts, tunables, measurements)
    return Calibration(tunables, tuple(measurements), "measured now, " + kept)


def _defaults(why: str) -> Calibration:
    return Calibration(_core.DEFAULT_TUNABLES, (), why)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Yield True while this process may measure, or False if another process is measuring, which
    would disturb both.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True  # no place for a lock file
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def cache_folder() -> Path:
    """The folder where tilework keeps files for this user; it may not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the specification says to ignore relative paths
        return Path(given) / "tilework"
    try:
        return Path.home() / ".cache" / "tilework"
    except RuntimeError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / f"tilework-{os.getuid()}"


def host_facts(cpus: frozenset[int] | None = None) -> dict[str, object]:
    """The facts that a calibration for some CPUs depends on; None: this process's CPUs."""
    return {
        "processor": processor_name(),
        "caches": cache_sizes(),
        "cores": usable_cores(cpus=cpus),
        "kernel": platform.release(),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "tilework": _version(),
        "abi": _core.ABI,
    }


def _version() -> str:
    try:
        return importlib.metadata.version("tilework")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor_name() -> str:
    """The processor's model, as the system names it."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, str]:
    """Sizes of the first core's caches of data, by level: {"L2": "1024K"}; empty where unknown."""
    sizes = {}
    for index in sorted(folder.glob("index*")):
        if _text(index / "type") in ("Data", "Unified"):
            sizes[f"L{_text(index / 'level')}"] = _text(index / "size")
    return sizes


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _digest(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path, facts: Mapping[str, object]) -> Calibration | None:
    """The calibration in a file; None if the file is invalid or for other facts."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_FILE_BYTES))
        tunables = _checked_tunables(content["tunables"])
        measurements = tuple(
            (str(operation), int(nbytes), str(way), float(seconds))
            for operation, nbytes, way, seconds in content["measurements"]
        )
        if content["facts"] != dict(facts):
            return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return Calibration(tunables, measurements, f"kept in {path}")


def _checked_tunables(found: Any) -> dict[str, int]:
    """The tunables of a file, after a check that they are all the core's tunables, and sizes.
    Raises ValueError or TypeError if not.
    """
    if set(found) != set(_core.DEFAULT_TUNABLES):
        raise ValueError("the file has other tunables than the core")
    for value in found.values():
        if type(value) is not int or not 0 <= value <= _core.NEVER_BYTES:
            raise ValueError(f"the value of a tunable is not a size in bytes: {value!r}")
    return dict(found)


def save(
    path: Path,
    facts: Mapping[str, object],
    tunables: Mapping[str, int],
    measurements: list[Measurement],
) -> str:
    """Write a calibration to file ``path``, whole or not at all; return "kept in …", or "not kept:
    …" with the reason.
    """
    content = {"facts": facts, "tunables": tunables, "measurements": measurements}
    new = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(".new", "calibration-", path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            if new:
                os.unlink(new)
        return f"not kept: {error.strerror or error}: {path.parent}"
    return f"kept in {path}"
