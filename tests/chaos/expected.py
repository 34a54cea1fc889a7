"""Whether what the ranks saw is what they had to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.plan import AT_ODDS, EARLY, LATE, LOST, Trial
from tests.chaos.rank_program import Anew, Report
from tilework.comm.backends.shm import CannotShareMemoryError
from tilework.errors import DistError

#: How soon a lost rank must be noticed. A busy machine is allowed for; the tally has the times.
NOTICE_SECONDS = 2.0


@dataclass
class Outcome:
    """A trial as its driver saw it."""

    trial: Trial
    reports: dict[int, Report] = field(default_factory=dict)
    anew: dict[int, Anew] = field(default_factory=dict)
    #: When the fault came, where the driver made it.
    struck: float | None = None
    #: What the driver itself ran into.
    trouble: str = ""

    def survivors(self) -> Iterator[tuple[int, Report]]:
        """Those that must hear of the fault."""
        for rank, report in self.reports.items():
            if rank not in self.trial.fault.victims:
                yield rank, report

    def notices(self) -> list[float]:
        """Seconds until each survivor's first error, where it is known when the fault came."""
        if self.struck is None or self.trial.fault.kind not in LOST:
            return []
        firsts = [
            min(heard.when for heard in report.heard.values())
            for _, report in self.survivors()
            if report.heard
        ]
        return [max(0.0, first - self.struck) for first in firsts]

    def complaints(self) -> list[str]:
        """Everything that is not as it must be."""
        if self.trouble:
            return [self.trouble]
        found = [*self._broken(), *self._left_behind()]
        if self.trial.fault.kind in EARLY:
            return [*found, *self._errors_at_all()]
        found += [
            complaint
            for rank, report in self.reports.items()
            for complaint in self._heard_wrongly(rank, report)
        ]
        late = [seconds for seconds in self.notices() if seconds > NOTICE_SECONDS]
        return [*found, *(f"noticed after {seconds:.2f} s" for seconds in late)]

    def _broken(self) -> Iterator[str]:
        for rank, report in self.reports.items():
            if report.broken:
                yield f"rank {rank} failed by itself:\n{report.broken}"
            if report.unmade and self.trial.fault.kind not in EARLY:
                yield f"rank {rank} could not make its groups: {report.unmade}"

    def _left_behind(self) -> Iterator[str]:
        n = self.trial.n - len(self.trial.gone)
        for rank, anew in self.anew.items():
            if anew.total != n * (n + 1) / 2:
                yield f"rank {rank}: the sum in the new group of {n} is {anew.total}"
            if not anew.after.within(anew.before):
                yield f"rank {rank} held {anew.before} before and {anew.after} afterwards"
        if len(self.anew) != n:
            yield f"only ranks {sorted(self.anew)} made a new group"

    def _errors_at_all(self) -> Iterator[str]:
        for rank, report in self.survivors():
            heard = list(report.heard.values()) + ([report.unmade] if report.unmade else [])
            if not heard or not all(issubclass(one.kind, DistError) for one in heard):
                yield f"rank {rank} heard {heard}"
            if any(issubclass(one.kind, CannotShareMemoryError) for one in heard):
                yield f"rank {rank} takes a death for another host: {heard}"

    def _heard_wrongly(self, rank: int, report: Report) -> Iterator[str]:
        if report.left_early:
            return
        trial = self.trial
        doomed = {g for g in trial.doomed if rank in trial.groups[g]}
        if set(report.heard) != doomed:
            yield (
                f"rank {rank}: groups {sorted(report.heard)} failed, not {sorted(doomed)}: "
                + str(report.heard)
            )
        for group in doomed & set(report.heard):
            heard, again = report.heard[group], report.again.get(group)
            if heard.kind is not trial.expected:
                yield f"rank {rank}, group {group}: expected {trial.expected}, heard {heard}"
            if rank not in trial.fault.victims and not self._named_rightly(group, heard.ranks):
                yield f"rank {rank}, group {group}: the wrong ranks are named: {heard}"
            if again != heard.kind.__name__:
                yield f"rank {rank}, group {group}: {again} when called again, after {heard}"

    def _named_rightly(self, group: int, ranks: tuple[int, ...]) -> bool:
        victims = set(self.trial.fault.victims) & set(self.trial.groups[group])
        if self.trial.fault.kind in (*AT_ODDS, *LATE):
            return bool(victims & set(ranks))
        return bool(ranks) and set(ranks) <= victims
