"""Counts over many trials, and a table of them."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from rich.table import Table

from tests.chaos.expected import Outcome
from tests.chaos.plan import WORDS


@dataclass
class Statistics:
    """What came of trials."""

    trials: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    errors: dict[str, Counter[str]] = field(default_factory=dict)
    notices: dict[str, list[float]] = field(default_factory=dict)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count a trial."""
        kind = outcome.trial.fault.kind
        self.trials[kind] += 1
        self.notices.setdefault(kind, []).extend(outcome.notices())
        errors = self.errors.setdefault(kind, Counter())
        for rank, report in outcome.reports.items():
            self.operations.update(report.operations)
            if rank not in outcome.trial.fault.victims:
                errors.update(error.kind.__name__ for error in report.errors.values())
                errors.update([report.unmade.kind.__name__] if report.unmade else [])
        if outcome.violations():
            self.failed.append(outcome)

    def table(self, title: str) -> Table:
        """One line for each kind of fault."""
        table = Table(title=title, title_justify="left")
        for column in ("a rank …", "trials", "errors that the others raised", "noticed after, ms"):
            table.add_column(column, justify="right" if column == "trials" else "left")
        for kind in WORDS:
            if not self.trials[kind]:
                continue
            errors = ", ".join(f"{n} {name}" for name, n in sorted(self.errors[kind].items()))
            table.add_row(
                WORDS[kind],
                str(self.trials[kind]),
                errors or "none",
                times_in_words(self.notices[kind]),
            )
        right = sum(self.operations.values())
        table.caption = (
            f"{self.trials.total()} trials, {right} operations with the right result on a rank, "
            f"{len(self.failed)} trials failed"
        )
        return table


def times_in_words(seconds: list[float]) -> str:
    """The median and the worst of some times, and how many of them are long."""
    if not seconds:
        return ""
    late = sum(one > 1 for one in seconds)
    return (
        f"median {statistics.median(seconds) * 1e3:.0f}, worst {max(seconds) * 1e3:.0f}"
        f" ({late} of {len(seconds)} over 1 s)"
    )
