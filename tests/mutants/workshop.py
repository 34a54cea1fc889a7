"""A copy of the repository, in which mutants are made and tested one after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.csrc.simulation.build import CannotBuildError
from tests.csrc.simulation.build import build as build_simulation
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
#: For the tests of one mutant: one that hangs is caught by pytest's own limit long before.
MOST_SECONDS = 600
SIMULATED_SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant."""

    caught: bool
    #: The first test that failed, or the simulation's words.
    how: str


class Workshop:
    """The copy; sources that have not changed keep their times, so that little is compiled anew."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._core = folder / "core"

    def renew(self) -> None:
        """Make the copy what the repository is now."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for path in self.tree.rglob("*"):
            name = str(path.relative_to(self.tree))
            if path.suffix in SOURCES and name not in names and not name.startswith("build/"):
                path.unlink()
        for name in names:
            source, copy = ROOT / name, self.tree / name
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The copy with a fault in it."""
        before = mutant.apply(self.tree)
        try:
            yield
        finally:
            (self.tree / mutant.path).write_text(before)

    def judge(self, mutant: Mutant) -> Verdict:
        """Make a mutant, and see if it is caught."""
        with self.changed(mutant):
            return self.simulate() if mutant.simulated else self.test(mutant.tests)

    def simulate(self) -> Verdict:
        """Random programs in random interleavings, until one goes wrong."""
        done = subprocess.run(
            [build_simulation(self.tree), "--seconds", str(SIMULATED_SECONDS), "--events", "0"],
            capture_output=True,
            text=True,
        )
        found = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        return Verdict(done.returncode != 0, found[0] if found else done.stdout.strip())

    def test(self, tests: Sequence[str]) -> Verdict:
        """Run tests of the copy."""
        self._build_core()
        command = (sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider")
        try:
            done = subprocess.run(
                [*command, "--no-header", *tests],
                cwd=self.tree,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.tree / "src")])},
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Verdict(True, f"no end within {MOST_SECONDS} s")
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode and not failed:  # the process itself was ended, as by a crash
            failed = ["pytest: " + " ".join((done.stdout + done.stderr).splitlines()[-1:])]
        return Verdict(done.returncode != 0, failed[0] if failed else "all passed")

    def _build_core(self) -> None:
        if not (self._core / "CMakeCache.txt").exists():
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            _run(
                *("cmake", "-S", str(self.tree), "-B", str(self._core), *generator),
                *("-DTILEWORK_MULTIVERSION=OFF", f"-DPython_EXECUTABLE={sys.executable}"),
                f"-DTILEWORK_OUTPUT_DIRECTORY={self.tree / 'src/tilework'}",
            )
        _run("cmake", "--build", str(self._core), "-j", "2")


#: Of files that are removed from the copy where the repository has them no more.
SOURCES = {".py", ".pyi", ".cpp", ".h", ".txt", ".md", ".toml"}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(done.stdout + done.stderr)
