"""The report on a planned job: memory, bytes, time, and what would go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilework.comm.per_call.internal import MeetingCost
from tilework.inspect import Peak
from tilework.plan.cluster import Cluster
from tilework.plan.mismatches import Mismatch
from tilework.plan.timing import RankTime
from tilework.show import Page, Shown, TextTable, bytes_text, count_text

#: The most modules in the table of memory.
_MOST_ROWS = 12
#: By how much the memory of a process was more than the counted peak, at most, with all runs of
#: benchmarks/resident.py on a CPU: bytes, and a part of the peak.
_PROCESS, _MORE, _PART = 320_000_000, 60_000_000, 0.36


@dataclass(frozen=True)
class AxisTraffic:
    """The communication of a rank along an axis of a mesh.

    Attributes:
        nbytes: The bytes that the rank sends or receives, whichever is more.
        calls: The number of collectives.
        messages: The number of messages to single ranks.
    """

    nbytes: int = 0
    calls: int = 0
    messages: int = 0


@dataclass(frozen=True)
class StartCost:
    """The costs of making the groups of a job whose ranks make as many as one rank that ran.

    Counted by running the code of ranks that meet, without looks of ranks that wait for others.

    Attributes:
        groups: The groups that a rank makes.
        requests: The requests of all ranks to the job's store, and ``most`` those of a rank.
        connections: The connections of all ranks to the store.
    """

    groups: int = 0
    requests: int = 0
    most: int = 0
    connections: int = 0

    @classmethod
    def of(cls, meetings: Sequence[MeetingCost], ranks: int) -> StartCost:
        """The cost for ``ranks`` ranks, each of which is in such meetings."""
        alike = [ranks // len(each.ranks) for each in meetings]
        pairs = list(zip(meetings, alike, strict=True))
        return cls(
            len(meetings),
            sum(each.requests * count for each, count in pairs),
            sum(each.most for each in meetings),
            sum(each.connections * count for each, count in pairs),
        )

    def __str__(self) -> str:
        return (
            f"starting: {count_text(self.groups, 'group')} of a rank, {self.requests:,} requests "
            f"to the store (at most {self.most} of a rank), {self.connections:,} connections to it"
        )


@dataclass(frozen=True)
class RankReport:
    """The report on a rank that ran, and stands for a kind of ranks.

    Attributes:
        rank: The rank.
        peak: The memory at the moment of the most, by module and use.
        traffic: By axis, the communication.
        checks: The number of collectives by which ranks only compare what they do.
        chain: The collectives and messages that wait for each other, in a row.
        time: The expected time.
        start: What starting costs.
        stopped: The reason for which the rank stopped after it had left the job; "".
        assumed: What was assumed of values that only a real run has.
        saved: The bytes of checkpoints that the rank would write.
    """

    rank: int
    peak: Peak
    traffic: Mapping[str, AxisTraffic]
    checks: int
    chain: int
    time: RankTime
    start: StartCost = field(default_factory=StartCost)
    stopped: str = ""
    assumed: frozenset[str] = frozenset()
    saved: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes along all axes."""
        return sum(each.nbytes for each in self.traffic.values())


@dataclass(frozen=True)
class Change:
    """A change of the program that would save memory, with the effect.

    Attributes:
        text: The change.
        saved: The bytes that a rank saves at the peak, at most.
        cost: What the change costs.
    """

    text: str
    saved: int
    cost: str


@dataclass(frozen=True)
class Branch:
    """A line at which the program branches on a value of a real run.

    The report on a job is of the way on which each answer is no (yes, if the program raises an
    error after no). Here it is the other, at this line.

    Attributes:
        site: The line, as ``file:line in function``.
        report: The report on the other way; None: it calls the same, and has the same peak.
        ends: The error with which the program ends on the other way; "": it does not.
    """

    site: str
    report: PlanReport | None = None
    ends: str = ""

    def __str__(self) -> str:
        if self.ends:
            return f"{self.site}: the other way ends by {self.ends}"
        if self.report is None:
            return f"{self.site}: both ways are the same for the plan"
        worst = self.report.worst
        moves = max(each.nbytes for each in self.report.kinds)
        found = "".join(f"; {each}" for each in self.report.mismatches)
        return (
            f"{self.site}: all ranks must take one way. On the other, peak "
            f"{bytes_text(worst.peak.bytes)}, a rank moves {bytes_text(moves)}{found}"
        )


@dataclass(frozen=True)
class PlanReport(Shown):
    """The report on a job. ``print`` shows it, and rich draws it.

    Attributes:
        ranks: The number of ranks.
        hosts: The number of hosts.
        cluster: The machines.
        kinds: The ranks that ran. Only they are proven.
        mismatches: Ranks that would part, or wait forever.
        changes: The cheapest changes, if memory does not suffice.
        branches: The lines at which the program branches on values of a real run.
        seconds: The seconds that planning took.
    """

    ranks: int
    hosts: int
    cluster: Cluster
    kinds: Sequence[RankReport]
    mismatches: Sequence[Mismatch] = ()
    changes: Sequence[Change] = ()
    branches: Sequence[Branch] = ()
    seconds: float = 0.0
    everyone: bool = field(default=False)

    @property
    def worst(self) -> RankReport:
        """The rank with the highest peak of memory."""
        return max(self.kinds, key=lambda each: each.peak.bytes)

    @property
    def fits(self) -> bool:
        """True if each rank that ran has enough memory."""
        limit = self.cluster.memory
        return limit is None or self.worst.peak.bytes <= limit

    @property
    def most_resident(self) -> int:
        """The bytes that the process of the worst rank takes on a CPU, at most, as measured: with
        Python and libraries, memory that the allocator keeps, and pages that ranks share.
        """
        return _PROCESS + _MORE + int((1 + _PART) * self.worst.peak.bytes)

    @property
    def is_good(self) -> bool:
        """True if memory suffices, and no rank parts from the others, on all ways."""
        others = [each.report for each in self.branches if each.report is not None]
        return self.fits and not self.mismatches and all(each.is_good for each in others)

    def with_changes(self) -> PlanReport:
        """The report, with changes if memory does not suffice: the cheapest first."""
        if self.fits:
            return self
        peak = self.worst.peak.by_use()
        share = (self.ranks - 1) / self.ranks
        states = peak["optimizer states"]
        shards = peak["parameters"] + peak["gradients"] + states
        found = [
            Change(
                "recompute activations in backward (apply_activation_checkpointing)",
                peak["activations"] // 2,
                "a second forward pass",
            ),
            Change(
                "shard optimizer states over all ranks (ZeroRedundancyOptimizer)",
                int(states * share),
                f"{2 * peak['parameters']:,} bytes a step",
            ),
            Change(
                "shard parameters, gradients and states over all ranks (fully_shard)",
                int(shards * share),
                f"{3 * peak['parameters']:,} bytes a step",
            ),
        ]
        return replace(self, changes=tuple(change for change in found if change.saved > 0))

    def __rich__(self) -> Page:
        head = (
            f"{count_text(self.ranks, 'rank')} on {count_text(self.hosts, 'host')}, "
            f"planned in {self.seconds:.1f} s"
        )
        ran = ", ".join(str(each.rank) for each in self.kinds[:16])
        more = f" and {len(self.kinds) - 16} more" if len(self.kinds) > 16 else ""
        which = "every rank" if self.everyone else f"ranks {ran}{more}, one of each kind"
        parts: list[str | TextTable] = [head, f"ran: {which}; only what ran is proven", ""]
        parts += [*self._memory(), "", self._ranks(), "", *self._traffic()]
        for rank in self.kinds:
            if rank.stopped:
                parts.append(f"rank {rank.rank}, after it had left the job: {rank.stopped}")
        if self.branches:
            parts += ["", "values that only a real run has, each line both ways:"]
            parts += [f"  {branch}" for branch in self.branches]
        parts += ["", *self._findings()]
        return Page(*parts)

    def _memory(self) -> list[str | TextTable]:
        peak, limit = self.worst.peak, self.cluster.memory
        of = "" if limit is None else f" of {bytes_text(limit)}"
        uses = ", ".join(f"{use} {bytes_text(n)}" for use, n in peak.by_use().items() if n)
        by = Counter(peak.by).most_common(_MOST_ROWS)
        rows = [(module or "-", use, bytes_text(n)) for (module, use), n in by]
        process = (
            f"the process: at most {bytes_text(self.most_resident)} (measured on CPUs: Python and "
            f"libraries {bytes_text(_PROCESS)}; allocator and shared pages up to "
            f"{bytes_text(_MORE)} and {_PART:.0%} of the peak)"
        )
        return [
            f"memory: at most {bytes_text(peak.bytes)}{of}, on rank {self.worst.rank} ({uses})",
            *([process] if self.cluster.device == "cpu" else []),
            TextTable(("module", "use", "bytes"), rows, {2}),
        ]

    def _ranks(self) -> TextTable:
        rows = [
            (
                str(each.rank),
                bytes_text(each.peak.bytes),
                bytes_text(each.nbytes),
                str(each.chain),
                str(each.time),
            )
            for each in self.kinds[:_MOST_ROWS]
        ]
        return TextTable(("rank", "peak", "moves", "chain", "time"), rows, {0, 1, 2, 3})

    def _traffic(self) -> list[str | TextTable]:
        busiest = max(self.kinds, key=lambda each: each.nbytes)
        rows = [
            (axis, f"{each.nbytes:,}", str(each.calls), str(each.messages))
            for axis, each in busiest.traffic.items()
        ]
        table = TextTable(("axis", "bytes", "collectives", "messages"), rows, {1, 2, 3})
        return [
            f"communication of rank {busiest.rank}, besides {busiest.checks} small comparisons of "
            f"ranks",
            table,
            *self.notes,
            str(max((each.start for each in self.kinds), key=lambda start: start.requests)),
        ]

    @property
    def notes(self) -> list[str]:
        """The facts behind the numbers, in sentences."""
        known = "from measured operators, without the Python of wrappers"
        note = known if self.cluster.is_measured else "an estimate: nothing was measured"
        assumed = set[str]().union(*(each.assumed for each in self.kinds))
        saved = max(each.saved for each in self.kinds)
        files = (
            f"checkpoints: {bytes_text(saved)} of a rank; to write them takes time, and ranks tell "
            f"each other of files, which is not counted"
        )
        facts = [f"times are {note}", *(f"assumed: {each}" for each in sorted(assumed))]
        return [*facts, files] if saved else facts

    @property
    def lacks(self) -> list[str]:
        """By how much memory does not suffice, and what would help, in sentences."""
        if self.fits:
            return []
        over = bytes_text(self.worst.peak.bytes - (self.cluster.memory or 0))
        return [
            f"memory does not suffice: rank {self.worst.rank} lacks {over}",
            *(
                f"  {each.text}: saves up to {bytes_text(each.saved)}, costs {each.cost}"
                for each in self.changes
            ),
        ]

    def _findings(self) -> list[str]:
        if self.is_good:
            return ["no mismatch, and memory suffices" if self.cluster.memory else "no mismatch"]
        return [*map(str, self.mismatches), *self.lacks]
