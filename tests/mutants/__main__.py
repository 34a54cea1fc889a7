"""Small faults, each made in a copy of the sources and tested: ``make mutants``.

Prints which were caught, by what, and the score. Results are kept until the changed file or its
tests change, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.csrc.simulation.build import CannotBuildError
from tests.mutants.core import CORE
from tests.mutants.mutant import Mutant
from tests.mutants.package import PACKAGE
from tests.mutants.workshop import ROOT, Verdict, Workshop

MUTANTS = [*CORE, *PACKAGE]
FOLDER = ROOT / "build" / "mutants"
LEAST_SCORE = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants ARGS=…", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of names, 'step*'")
    parser.add_argument("--afresh", action="store_true", help="forget earlier results")
    parser.add_argument("--list", action="store_true", help="print the names, and do nothing")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a fault first"
    )
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if any(fnmatch(m.name, name) for name in arguments.names)]
    console = Console()
    if arguments.list:
        console.print("\n".join(mutant.name for mutant in chosen), markup=False)
        return 0
    if problems := [problem for mutant in chosen if (problem := mutant.problem(ROOT))]:
        console.print("\n".join(problems), markup=False)
        return 2
    workshop, results = Workshop(FOLDER), Results(FOLDER / "results.json", arguments.afresh)
    workshop.renew()
    open_ = [mutant for mutant in chosen if mutant not in results]
    if open_ and not arguments.trust and (why := fails_without_fault(workshop, open_, console)):
        console.print(f"The tests fail without any fault: {why}", markup=False)
        return 2
    for number, mutant in enumerate(open_, 1):
        console.print(f"{number} of {len(open_)}: {mutant.name}", markup=False)
        results.add(mutant, workshop)
    return report(chosen, results, console)


class Results:
    """Verdicts and seconds by mutant, in a file."""

    def __init__(self, path: Path, afresh: bool) -> None:
        self._path = path
        #: As they were when the copy was made: files may change meanwhile.
        self._keys: dict[str, str] = {}
        known = path.exists() and not afresh
        self._all: dict[str, tuple[bool, str, float]] = (
            json.loads(path.read_text()) if known else {}
        )

    def __contains__(self, mutant: Mutant) -> bool:
        return self._key(mutant) in self._all

    def _key(self, mutant: Mutant) -> str:
        return self._keys.setdefault(mutant.name, mutant.key(ROOT))

    def of(self, mutant: Mutant) -> tuple[bool, str, float]:
        """Whether it was caught, how, and the seconds that it took."""
        return self._all[self._key(mutant)]

    def add(self, mutant: Mutant, workshop: Workshop) -> None:
        """Judge a mutant, and keep the result."""
        start = time.monotonic()
        try:
            verdict = workshop.judge(mutant)
        except CannotBuildError as error:
            verdict = Verdict(False, f"it does not compile: {str(error)[-300:]}")
        seconds = time.monotonic() - start
        self._all[self._key(mutant)] = (verdict.caught, verdict.how, seconds)
        self._path.write_text(json.dumps(self._all, indent=1))


def fails_without_fault(workshop: Workshop, mutants: list[Mutant], console: Console) -> str:
    """The first failure where nothing was changed; "" if all is well."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    console.print(f"without a fault: {len(tests)} files of tests, and the simulation")
    verdicts = [workshop.test(tests)] if tests else []
    if any(mutant.simulated for mutant in mutants):
        verdicts.append(workshop.simulate())
    return next((verdict.how for verdict in verdicts if verdict.caught), "")


def report(mutants: list[Mutant], results: Results, console: Console) -> int:
    """Print all results; 0 if enough were caught."""
    table = Table(title="Mutants", title_justify="left")
    for column in ("fault", "file", "caught", "by", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for mutant in mutants:
        caught, how, seconds = results.of(mutant)
        by = how.partition(" - ")[0].removeprefix("FAILED ")
        mark = "[green]yes[/]" if caught else "[red]NO[/]"
        table.add_row(mutant.name, mutant.path.split("/")[-1], mark, by[:90], f"{seconds:.0f}")
    score = sum(results.of(mutant)[0] for mutant in mutants)
    total = sum(results.of(mutant)[2] for mutant in mutants)
    table.caption = f"{score} of {len(mutants)} caught ({score / len(mutants):.0%}), {total:.0f} s"
    console.print(table)
    return int(score < LEAST_SCORE * len(mutants))


if __name__ == "__main__":
    sys.exit(main())
