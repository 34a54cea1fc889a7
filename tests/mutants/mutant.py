"""A small fault in a copy of the sources, and the part of the suite that must notice it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

#: In place of tests: the simulation of the core, a minute of it at most.
SIMULATION = "simulation"


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    #: The file, from the root of the repository.
    path: str
    #: A text that stands there once, and what takes its place.
    old: str
    new: str
    #: SIMULATION, or tests for pytest, separated by spaces.
    caught_by: str

    @property
    def simulated(self) -> bool:
        return self.caught_by == SIMULATION

    @property
    def tests(self) -> tuple[str, ...]:
        return () if self.simulated else tuple(self.caught_by.split())

    def problem(self, root: Path) -> str:
        """The reason why it cannot be applied there; "" if it can."""
        path = root / self.path
        count = path.read_text().count(self.old) if path.exists() else 0
        if count != 1:
            return f"{self.name}: this stands {count} times in {self.path}, not once:\n{self.old}"
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).exists()]
        return f"{self.name}: there is no {missing[0]}" if missing else ""

    def apply(self, root: Path) -> str:
        """Change the file; the text that it had."""
        path = root / self.path
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        return text

    def key(self, root: Path) -> str:
        """A digest of all that its result depends on, but for what the changed file uses."""
        files = [self.path, *(test.partition("::")[0] for test in self.tests)]
        texts = [(root / file).read_text() for file in files if (root / file).is_file()]
        return hashlib.sha256(repr((self, texts)).encode()).hexdigest()
