"""What is measured, and what follows from the measured times: plain numbers, no ranks.

``collectives.py`` makes a :class:`Plan`, its ranks measure each :class:`Case` of it, and their
times become a :class:`Cell` each.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
#: The largest of a rank's buffers; all_gather's output is the size times the number of ranks.
LARGEST = 64 * MIB
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send_recv",
)
#: Measured when they are asked for: what does not block at its call, and is waited for at once.
ASYNC_OPERATIONS = ("exchange", "batch", "async_all_reduce")
#: Between two ranks.
_OF_A_PAIR = ("send_recv", "exchange", "batch")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
#: The first is compared with all others.
TILEWORK, GLOO, OPEN_MPI = "tilework", "Gloo", "Open MPI"
#: Implementations of MPI, by what each calls itself.
MPIS = {OPEN_MPI: "Open MPI", "MPICH": "MPICH", "Intel MPI": "Intel(R) MPI"}
#: In each cell the quickest of them.
BEST_MPI = "best MPI"
#: What is measured beside the peers where memory's limit is asked for.
COPY, ADD = "copy", "add"
SEGMENT = "in the segment"

#: What each of two cores does at least, in copies and additions of a whole buffer of LARGEST bytes:
#: an in-place all_reduce adds half of the peer's buffer and copies the other half's sum; what is
#: moved is copied once. A broadcast's root may copy a part of it, and beat its receiver alone.
MEMORY_WORK = {
    "all_reduce": (0.5, 0.5),
    "broadcast": (1.0, 0.0),
    "all_gather": (1.0, 0.0),
    "all_to_all": (1.0, 0.0),
}

Times = Mapping[str, float | None]


@dataclass(frozen=True)
class Case:
    """One operation on one dtype and size."""

    operation: str
    dtype: str
    """"-" where there is no data."""
    bytes: int
    """Of each rank's input to all_gather, of its output of reduce_scatter, else of its buffer."""

    @property
    def has_limit(self) -> bool:
        """Whether memory's limit is measured with it, on two ranks."""
        largest = LARGEST // parts(self.operation, 2)
        return (self.dtype, self.bytes) == ("float32", largest) and self.operation in MEMORY_WORK

    def __str__(self) -> str:
        return " ".join([self.operation, *([size_text(self.bytes), self.dtype] * bool(self.bytes))])


@dataclass(frozen=True)
class Plan:
    """How much is measured, of whom."""

    peers: tuple[str, ...]
    cores: int
    operations: tuple[str, ...] = OPERATIONS
    dtypes: tuple[str, ...] = tuple(ITEM_BYTES)
    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    """Turns that each peer gets on each case."""
    seconds: float = 0.05
    """What one turn may take, if that allows for the least number of calls."""
    neighbours: int = 0
    """Processes beside the ranks that compute all the time."""
    spread: float = 0.1
    """Turns go on, up to three times ``rounds``, until no peer's spread is larger than this."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Plan:
        """Of what dataclasses.asdict and json made of one."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    def cases(self, ranks: int) -> Iterator[Case]:
        """What the table has for this number of ranks."""
        for operation in self.operations:
            if operation == "barrier":
                yield Case(operation, "-", 0)
            elif operation not in _OF_A_PAIR or ranks == 2:
                for dtype in self.dtypes:
                    most = LARGEST // parts(operation, ranks)
                    for size in sorted({min(size, most) for size in self.sizes}):
                        yield Case(operation, dtype, size)

    def segment_cases(self, ranks: int) -> Iterator[Case]:
        """What is also measured with buffers that live in the segment."""
        for case in self.cases(ranks):
            smaller = case.dtype == "float32" and case.bytes == 16 * MIB
            if case == Case("all_reduce", "float32", LARGEST) or (
                smaller and case.operation != "all_reduce"
            ):
                yield case


def parts(operation: str, ranks: int) -> int:
    """How many times a case's size the larger buffer of a rank is."""
    return ranks if operation in ("all_gather", "reduce_scatter") else 1


@dataclass(frozen=True)
class Cell:
    """A case's times on one number of ranks."""

    case: Case
    ranks: int
    seconds: Times
    """Of one call, by peer; None: the peer lacks it."""
    limit: float | None = None
    """The least seconds that memory allows."""
    means: Times = field(default_factory=dict)
    """As ``seconds``, but means of all calls: they show time slices that were lost."""
    spreads: Times = field(default_factory=dict)
    """Half the range of the middle half of the rounds' medians, as a share of ``seconds``."""

    def by_means(self) -> Cell:
        """The cell with means for medians."""
        return replace(self, seconds=self.means or self.seconds, spreads={})

    def ratio(self, peer: str) -> float | None:
        """How many times as long as tilework the peer takes; None where it lacks the operation."""
        ours, theirs = self.seconds[TILEWORK], self.seconds.get(peer)
        return None if ours is None or theirs is None else theirs / ours

    def share(self, peer: str) -> float | None:
        """The share of the limit that the peer reaches, of 1."""
        theirs = self.seconds.get(peer)
        return None if self.limit is None or theirs is None else self.limit / theirs

    def __str__(self) -> str:
        return f"{self.case} on {self.ranks} ranks"


def combine(case: Case, ranks: int, by_rank: Sequence[Times]) -> Cell:
    """Put the ranks' median times together: of peers the slowest rank's counts."""
    seconds: dict[str, float | None] = {}
    share = 0.5 if case.operation == "send_recv" else 1.0  # there and back was measured
    for name in by_rank[0]:
        known = [taken * share for times in by_rank if (taken := times[name]) is not None]
        if name in (COPY, ADD):
            seconds[name] = statistics.fmean(known)
        else:
            seconds[name] = max(known) if known else None
    copy, add = seconds.pop(COPY, None), seconds.pop(ADD, None)
    limit = None if copy is None or add is None else limit_seconds(case.operation, copy, add)
    return Cell(case, ranks, seconds, limit)


def spread(medians: Sequence[float]) -> float:
    """Half the range of the middle half, as a share of the median."""
    if len(medians) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(medians, n=4, method="inclusive")
    return (high - low) / 2 / middle


def cell_of(case: Case, ranks: int, by_rank: Sequence[Mapping[str, Any]]) -> Cell:
    """The cell of what the ranks measured: (median, mean, spread) of each name, None if lacking."""
    medians, means = (
        combine(case, ranks, [{n: f and f[i] for n, f in rank.items()} for rank in by_rank])
        for i in (0, 1)
    )
    known = {name: [rank[name][2] for rank in by_rank if rank[name]] for name in medians.seconds}
    spreads = {name: max(values) for name, values in known.items() if values}
    return replace(medians, means=means.seconds, spreads=spreads)


def join(runs: Sequence[Cell]) -> Cell:
    """One cell of a case's, each of which has tilework beside other peers.

    Ratios stay as they were measured, beside the first run's time of tilework.
    """
    joined = runs[0]
    for run in runs[1:]:
        kept = {name for name in run.seconds if name not in joined.seconds}
        joined = replace(
            joined,
            seconds={**joined.seconds, **_beside(joined.seconds, run.seconds, kept)},
            means={**joined.means, **_beside(joined.means, run.means, kept)},
            spreads={**joined.spreads, **{n: s for n, s in run.spreads.items() if n in kept}},
        )
    return joined


def _beside(first: Times, other: Times, names: set[str]) -> Times:
    ours, again = first.get(TILEWORK), other.get(TILEWORK)
    factor = ours / again if ours and again else 1.0
    return {name: t and t * factor for name, t in other.items() if name in names}


def with_best_mpi(cell: Cell) -> Cell:
    """The cell with tilework and the quickest MPI alone."""
    return replace(cell, seconds=_best(cell.seconds), means=_best(cell.means), spreads={})


def _best(times: Times) -> Times:
    known = [t for name, t in times.items() if name in MPIS and t is not None]
    return {TILEWORK: times.get(TILEWORK), BEST_MPI: min(known, default=None)}


def limit_seconds(operation: str, copy: float, add: float) -> float:
    """What memory's work of an operation on two ranks takes.

    Args:
        operation: One of ``MEMORY_WORK``.
        copy: Seconds in which each of two cores at once copies a whole buffer.
        add: Seconds in which each adds a whole buffer to another in place.
    """
    copies, additions = MEMORY_WORK[operation]
    return copies * copy + additions * add


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that fits ratios: of 2 and 1/2 it is 1."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def compare(cells: Sequence[Cell], peer: str) -> dict[str, Any]:
    """Geometric means of the peer's ratios over parts of the table, and where it is faster."""
    wanted: dict[str, Callable[[Cell], bool]] = {
        "all": lambda cell: True,
        "up to 64 KiB": lambda cell: cell.case.bytes <= 64 * KIB,
        "above 64 KiB": lambda cell: cell.case.bytes > 64 * KIB,
    }
    if peer != GLOO:
        wanted["from 4 KiB"] = lambda cell: cell.case.bytes >= 4 * KIB
    for ranks in sorted({cell.ranks for cell in cells}):
        wanted[f"{ranks} ranks"] = lambda cell, ranks=ranks: cell.ranks == ranks  # type: ignore[misc]
    known = [(cell, ratio) for cell in cells if (ratio := cell.ratio(peer)) is not None]
    means = {}
    for where, belongs in wanted.items():
        if chosen := [ratio for cell, ratio in known if belongs(cell)]:
            means[where] = round(geometric_mean(chosen), 3)
    slower = {str(cell): round(ratio, 3) for cell, ratio in known if ratio < 1}
    return {"cells": len(known), "geometric_means": means, "tilework_slower": slower}


def scaled(seconds: float, ranks: int, cores: int) -> float:
    """A time that stays the same if more ranks than cores slow down in proportion to them."""
    return seconds * min(1.0, cores / ranks)


def to_json(cell: Cell) -> dict[str, Any]:
    """A cell, for a file."""
    known = {name: value for name, value in cell.seconds.items() if value is not None}
    fields: dict[str, Any] = dataclasses.asdict(cell.case) | {"ranks": cell.ranks}
    fields["microseconds"] = {name: round(value * 1e6, 3) for name, value in known.items()}
    ratios = {name: cell.ratio(name) for name in known if name != TILEWORK}
    fields["ratios"] = {name: round(ratio, 3) for name, ratio in ratios.items() if ratio}
    fields["mean_microseconds"] = {n: round(t * 1e6, 3) for n, t in cell.means.items() if t}
    fields["spreads"] = {n: round(s, 3) for n, s in cell.spreads.items() if s is not None}
    if cell.limit is not None:
        fields["limit_microseconds"] = round(cell.limit * 1e6, 3)
    return fields


def size_text(size: int) -> str:
    """A number of bytes, as in the table."""
    if size == 0:
        return "-"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
