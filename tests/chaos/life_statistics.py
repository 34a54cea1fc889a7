"""Counts over many lives, and a table of them by phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.table import Table

from tests.chaos.life_plan import PHASES
from tests.chaos.life_trials import LifeOutcome
from tests.chaos.statistics import times_in_words


@dataclass
class LifeStatistics:
    """What came of lives."""

    trials: Counter[str] = field(default_factory=Counter)
    errors: dict[str, Counter[str]] = field(default_factory=dict)
    notices: dict[str, list[float]] = field(default_factory=dict)
    failed: list[LifeOutcome] = field(default_factory=list)

    def add(self, outcome: LifeOutcome) -> None:
        """Count a trial."""
        life = outcome.life
        self.trials[life.phase] += 1
        reports = [report for rank, report in outcome.reports.items() if rank != life.victim]
        errors = self.errors.setdefault(life.phase, Counter())
        errors.update(report.kind for report in reports if report.kind)
        if life.is_noticed:
            self.notices.setdefault(life.phase, []).extend(outcome.notices().values())
        if outcome.violations():
            self.failed.append(outcome)

    def table(self, title: str) -> Table:
        """One line for each phase."""
        table = Table(title=title, title_justify="left")
        for column in ("struck in", "trials", "errors that others raised", "noticed after, ms"):
            table.add_column(column, justify="right" if column == "trials" else "left")
        for phase in PHASES:
            errors = ", ".join(
                f"{n} {name}" for name, n in sorted(self.errors.get(phase, {}).items())
            )
            noticed = times_in_words(self.notices.get(phase, []))
            if self.trials[phase]:
                table.add_row(phase, str(self.trials[phase]), errors or "none", noticed)
        table.caption = f"{self.trials.total()} trials, {len(self.failed)} failed"
        return table
