"""Whether what the ranks saw is what they had to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.plan import AT_ODDS, EARLY, LATE, LOST, Trial
from tests.chaos.rank_program import Report, Restart
from tilework.comm.backends.shm.shm_backend import CannotShareMemoryError
from tilework.errors import DistError

#: How soon a lost rank must be noticed. A busy machine is allowed for.
NOTICE_SECONDS = 2.0


@dataclass
class Outcome:
    """A trial as its driver saw it."""

    trial: Trial
    reports: dict[int, Report] = field(default_factory=dict)
    restarts: dict[int, Restart] = field(default_factory=dict)
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
            min(error.when for error in report.errors.values())
            for _, report in self.survivors()
            if report.errors
        ]
        return [max(0.0, first - self.struck) for first in firsts]

    def violations(self) -> list[str]:
        """Everything that is not as it must be."""
        if self.trouble:
            return [self.trouble]
        found = [*self._broken(), *self._left_behind()]
        if self.trial.fault.kind in EARLY:
            return [*found, *self._errors_at_all()]
        found += [
            violation
            for rank, report in self.reports.items()
            for violation in self._wrong_errors(rank, report)
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
        for rank, restart in self.restarts.items():
            if restart.total != n * (n + 1) / 2:
                yield f"rank {rank}: the sum in the new group of {n} is {restart.total}"
            if not restart.after.within(restart.before):
                yield f"rank {rank} held {restart.before} before and {restart.after} afterwards"
        if len(self.restarts) != n:
            yield f"only ranks {sorted(self.restarts)} made a new group"

    def _errors_at_all(self) -> Iterator[str]:
        for rank, report in self.survivors():
            errors = list(report.errors.values()) + ([report.unmade] if report.unmade else [])
            if not errors or not all(issubclass(one.kind, DistError) for one in errors):
                yield f"rank {rank} raised {errors}"
            if any(issubclass(one.kind, CannotShareMemoryError) for one in errors):
                yield f"rank {rank} takes a death for another host: {errors}"

    def _wrong_errors(self, rank: int, report: Report) -> Iterator[str]:
        if report.left_early:
            return
        trial = self.trial
        doomed = {g for g in trial.doomed if rank in trial.groups[g]}
        if set(report.errors) != doomed:
            yield (
                f"rank {rank}: groups {sorted(report.errors)} failed, not {sorted(doomed)}: "
                + str(report.errors)
            )
        for group in doomed & set(report.errors):
            error, again = report.errors[group], report.again.get(group)
            if error.kind is not trial.expected:
                yield f"rank {rank}, group {group}: expected {trial.expected}, raised {error}"
            if rank not in trial.fault.victims and not self._named_rightly(group, error.ranks):
                yield f"rank {rank}, group {group}: the wrong ranks are named: {error}"
            if again != error.kind.__name__:
                yield f"rank {rank}, group {group}: {again} when called again, after {error}"

    def _named_rightly(self, group: int, ranks: tuple[int, ...]) -> bool:
        victims = set(self.trial.fault.victims) & set(self.trial.groups[group])
        if self.trial.fault.kind in (*AT_ODDS, *LATE):
            return bool(victims & set(ranks))
        return bool(ranks) and set(ranks) <= victims
