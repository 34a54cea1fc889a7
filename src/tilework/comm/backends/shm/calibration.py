"""The host's calibration: the sizes at which the core changes algorithms.

The core measures a round of sizes (csrc/collectives/calibration.cpp) for each number of ranks and
kind of pages. Rounds are kept in the user's cache folder, keyed by everything they depend on. What
two rounds of different times agree on is sure; until then later processes measure further rounds.
Files are not trusted: an unreadable file, or a file for other facts, causes a new measurement. A
file appears as a whole or not at all. If no file can be written, each process measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tilework import huge_pages
from tilework.cores import Topology, affinity, host_topology, usable_cores
from tilework.optional_core import core as _core

if sys.platform != "win32":
    import fcntl

#: "0" or "off": measure and read nothing; use the core's defaults.
CALIBRATION_VARIABLE: Final = "TILEWORK_CALIBRATION"
#: "1" or "on": wherever possible; "0" or "off": never, also not between threads; else: where
#: measurements show it to be faster.
SINGLE_COPY_VARIABLE: Final = "TILEWORK_SINGLE_COPY"
_OFF, _ON = ("0", "off"), ("1", "on")
_CHUNKS: Final = ("chunk_bytes", "reduce_chunk_bytes")
_LEAST_CHUNK_BYTES: Final = 64 * 1024
#: The tunables of ranges of sizes in which peers' memory is read.
_SINGLE_COPY: Final = "single_copy_"
_BELOW: Final = "_below_bytes"
#: The smallest messages that are read from peers if the user wants that.
_WANTED_FROM_BYTES: Final = 64 * 1024
#: More ranks are taken to be like so many, and more than two on a core like two.
_MOST_RANKS: Final = 8
#: Seconds between two rounds: what disturbs for a while should not disturb both.
_LATER: Final = 600.0
_MOST_FILE_BYTES: Final = 1 << 16

#: (operation, bytes of a message, way, seconds).
Measurement = tuple[str, int, str, float]


@dataclass(frozen=True)
class Round:
    """The tunables that one measurement chose, the times that they follow from, and when."""

    at: float
    tunables: Mapping[str, int]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class Calibration:
    """Values for all tunables of the core: the sizes at which it changes algorithms, and sizes of
    chunks.

    Args:
        tunables: Sizes in bytes, by name; see csrc/transport/tunables.h.
        measurements: The times of the last round; empty if nothing was measured.
        origin: The origin of the values, for people.
        sureness: How many rounds agree on them, for people.
    """

    tunables: Mapping[str, int]
    measurements: tuple[Measurement, ...]
    origin: str
    sureness: str = ""


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
    known = host_calibration(ranks, cpus=cpus, before_measuring=before_measuring)
    tunables = chunks_for(host_topology(cpus), ranks, known.tunables)
    wanted = os.environ.get(SINGLE_COPY_VARIABLE, "").lower()
    for name in tunables:
        if wanted in _ON and name.startswith(_SINGLE_COPY):
            tunables[name] = _core.NEVER_BYTES if name.endswith(_BELOW) else _WANTED_FROM_BYTES
        elif wanted in _OFF and name.startswith((_SINGLE_COPY, "thread_copy_")):
            tunables[name] = _core.NEVER_BYTES
    return tunables


def read_ranges(tunables: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The sizes of messages that are read from peers, by operation: from one on, below another."""
    return {
        name.removeprefix(_SINGLE_COPY).removesuffix(_BELOW): (
            tunables[name.replace(_BELOW, "_bytes")],
            end,
        )
        for name, end in tunables.items()
        if name.startswith(_SINGLE_COPY) and name.endswith(_BELOW)
    }


def chunks_for(topology: Topology, ranks: int, tunables: Mapping[str, int]) -> dict[str, int]:
    """``tunables``, with chunks of at most a rank's share of half a second-level cache."""
    # Two threads of a core share a cache. Ranks that take turns on a core share it, too, but each
    # rank finds there what it wrote in its own turn.
    sharers = 1 if ranks > topology.cpus else -(-ranks // max(1, len(topology.cores)))
    most = topology.second_level_bytes // 2 // sharers // 4096 * 4096
    chunks = {name: min(tunables[name] // sharers, most or tunables[name]) for name in _CHUNKS}
    return {**tunables, **{name: max(size, _LEAST_CHUNK_BYTES) for name, size in chunks.items()}}


_lock = threading.Lock()
_known: dict[str, Calibration] = {}


def host_calibration(
    ranks: int = 2,
    *,
    cpus: frozenset[int] | None = None,
    remake: bool = False,
    before_measuring: Callable[[], object] | None = None,
) -> Calibration:
    """This host's calibration for groups of ``ranks`` ranks on some CPUs (None: those of this
    process): from this process's memory, from a file in the cache folder, or measured now: with
    ``remake`` in any case, and a further round with ``before_measuring``, if it is time.
    """
    if os.environ.get(CALIBRATION_VARIABLE, "").lower() in _OFF and not remake:
        return _defaults("turned off, by TILEWORK_CALIBRATION=0")
    cpus = affinity() if cpus is None else cpus
    facts = host_facts(cpus, ranks)
    path = cache_folder() / f"calibration-{_digest(facts)}.json"

    def kept() -> Calibration | None:
        if remake or str(path) in _known:
            return None if remake else _known[str(path)]
        rounds = load(path, facts)
        due = not rounds or (before_measuring is not None and _is_due(rounds))
        return None if due else _summary(rounds, f"kept in {path}")

    if before_measuring and usable_cores(cpus=cpus) > 1 and kept() is None:
        before_measuring()  # not under the lock: may wait for ranks that need the lock
    with _lock:  # threads of one process make groups at the same time
        known = kept()
        if known is None:
            known = _measured(path, facts, cpus, patient=not remake)
        _known[str(path)] = known
        return known


def _is_due(rounds: Sequence[Round]) -> bool:
    sure = len(rounds) > 1 and not _differing(*rounds)
    return not sure and abs(time.time() - rounds[-1].at) > _LATER


def _differing(first: Round, second: Round) -> list[str]:
    """The tunables of which two rounds found sizes that differ by more than a factor of two."""
    pairs = {name: (first.tunables[name], size) for name, size in second.tunables.items()}
    return [name for name, pair in pairs.items() if max(pair) > 2 * min(pair)]


def _summary(rounds: Sequence[Round], origin: str) -> Calibration:
    """The calibration that follows from the last rounds: what is beyond doubt."""
    last = rounds[-1]
    if len(rounds) == 1:
        return Calibration(last.tunables, last.measurements, origin, "one round, not confirmed yet")
    differing = _differing(*rounds)
    tunables = dict(last.tunables)
    for name in differing:
        sizes = rounds[0].tunables[name], last.tunables[name]
        if name.startswith(_SINGLE_COPY):  # where both rounds read
            tunables[name] = min(sizes) if name.endswith(_BELOW) else max(sizes)
        else:
            tunables[name] = _core.DEFAULT_TUNABLES[name]
    apart = f"two rounds differ in {', '.join(differing)}: only what both found is used"
    return Calibration(
        tunables, last.measurements, origin, apart if differing else "two rounds agree"
    )


def _measured(
    path: Path, facts: Mapping[str, Any], cpus: frozenset[int], *, patient: bool
) -> Calibration:
    """Measure a round, or without ``patient`` two, and keep the last two in file ``path``. If that
    fails, or with ``patient`` if the host is busy: what is known, or default values.
    """
    cores = usable_cores(cpus=cpus)
    if cores < 2:
        return _defaults("not measured: that takes two cores")
    rounds, why = list(load(path, facts)), "another process was measuring"
    with _alone(path) as alone:
        try:
            for _ in range(int(alone) if patient else 2):
                found = _core.calibrate(
                    sorted(cpus)[:cores], facts["ranks"], facts["huge_pages"], insists=not patient
                )
                rounds.append(Round(time.time(), found[0], tuple(found[1])))
                why = ""
        except (OSError, RuntimeError) as error:
            why = str(error)
    if why:
        return _summary(rounds, f"kept in {path}") if rounds else _defaults(f"not measured: {why}")
    return _summary(rounds[-2:], "measured now, " + save(path, facts, rounds[-2:]))


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


def host_facts(cpus: frozenset[int] | None = None, ranks: int = 2) -> dict[str, Any]:
    """The facts that a calibration depends on, for some CPUs (None: this process's) and ranks."""
    cores = usable_cores(cpus=cpus)
    return {
        "processor": processor_name(),
        "caches": cache_sizes(),
        "cores": cores,
        "ranks": min(_MOST_RANKS, 2 * cores, 1 << max(1, (ranks - 1).bit_length())),
        "kernel": platform.release(),
        "huge_pages": huge_pages.in_tensors(),
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


def load(path: Path, facts: Mapping[str, object]) -> list[Round]:
    """The rounds in a file, at most two; none if the file is invalid or for other facts."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_FILE_BYTES))
        if content["facts"] != dict(facts):
            return []
        return [_round(each) for each in content["rounds"]][-2:]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return []


def _round(found: Any) -> Round:
    measurements = tuple(
        (str(operation), int(nbytes), str(way), float(seconds))
        for operation, nbytes, way, seconds in found["measurements"]
    )
    return Round(float(found["at"]), _checked_tunables(found["tunables"]), measurements)


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


def save(path: Path, facts: Mapping[str, object], rounds: Sequence[Round]) -> str:
    """Write rounds to file ``path``, whole or not at all; return "kept in …", or "not kept: …"
    with the reason.
    """
    content = {"facts": facts, "rounds": [asdict(each) for each in rounds]}
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
