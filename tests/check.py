"""The fast loop: linters, types, and the tests of the changed files: ``python -m tests.check``.

Runs everything at once, and prints a line with the seconds of each. The tests are a fixed smoke
set, then those of the files changed since the upstream branch (``--since``): ``tests/a/test_b*.py``
for ``src/tilework/a/b.py``, else those of a row in :mod:`tests.tested_by`, else those of the
nearest folder; ``tests/csrc/a/test_b*.py`` for ``csrc/a/b.cpp``.
Tests that have not begun within the budget are skipped, and counted; ``make test`` runs all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.tested_by import guards, row_of

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
#: In seconds, from the end of collection to the start of the last test.
BUDGET = 45.0
#: Test modules of changed files; collecting more of them takes longer than running them.
MAX_MIRRORED = 24
#: Folders of rules that both tensors share, and the folders of their tests on each.
SHARED = {"tiled/rules": ("dtensor/rules", "sharded/ops")}
SMOKE = (
    "tests/test_layers.py",
    "tests/test_package.py",
    "tests/test_style.py",
    "tests/layout/test_box.py",
    "tests/layout/test_box_chunks.py",
    "tests/csrc/transport/test_completion.py",
    "tests/comm/backends/shm/test_shm_group_fast_path.py",
    "tests/store/test_address.py",
    "tests/mesh/test_spec.py",
    "tests/dtensor/test_api.py",
    "tests/dtensor/test_tensor_methods.py",
    "tests/sharded/test_tensor.py",
    "tests/sharded/test_specs.py",
    "tests/parallel/tensor_parallel/test_plans.py",
    "tests/rpc/test_calls.py",
    "tests/launch/test_output_lines.py",
)


@dataclass(frozen=True)
class Check:
    """A command, and the environment it needs."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> tuple[int, float, str]:
        """The exit status, the seconds and the output."""
        start = time.monotonic()
        done = subprocess.run(
            self.command,
            cwd=ROOT,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, time.monotonic() - start, done.stdout


def linters() -> list[Check]:
    """The checks of ``make lint``; the compiler's warnings are errors of the build itself."""
    folders = ("csrc", "tests/csrc", "tests/sanitizers")
    cpp = [
        str(path)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".cpp", ".h")
    ]
    mypy = f"{BIN}/mypy"
    # torch leaves some of its functions untyped, which only programs on it notice. Other options
    # need another cache: in one cache, each run would void the other's.
    programs = ("--allow-untyped-calls", "--no-warn-unused-ignores", "examples", "benchmarks")
    cache = "--cache-dir=.mypy_cache/programs"
    return [
        Check("ruff check", (f"{BIN}/ruff", "check", ".")),
        Check("ruff format", (f"{BIN}/ruff", "format", "--check", ".")),
        Check("clang-format", (f"{BIN}/clang-format", "--dry-run", "--Werror", *cpp)),
        Check("mypy", (mypy,), {"MYPYPATH": "src"}),
        Check("mypy, programs", (mypy, cache, *programs), {"MYPYPATH": "src:benchmarks:examples"}),
    ]


def changed_files(since: str | None) -> list[Path]:
    """Files that differ from ``since`` (default: the upstream branch), or are not in git yet."""
    base = since or _git("merge-base", "HEAD", "@{upstream}") or "HEAD"
    names = [*_git("diff", "--name-only", base).split("\n")]
    names += _git("ls-files", "--others", "--exclude-standard").split("\n")
    return [Path(name) for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def tests_of(path: Path) -> list[Path]:
    """The test modules of a file: of its name, its listed guards, or of the nearest folder."""
    if path.suffix not in (".py", ".cpp", ".h"):
        return []
    match path.parts:
        case ("tests", *_) if path.name.startswith("test_"):
            return [path]
        case ("tests", _, *_):
            return _modules(path.parent, "")
        case ("csrc", *_):
            folder = Path("tests") / path.parent
            return _modules(folder, path.stem) or _modules(folder, "")
        case ("src", "tilework", *_):
            row = row_of(Path(*path.parts[2:]))
            listed = [] if row is None else guards(row)
            its = [test for name in listed for test in modules_in(ROOT / "tests" / name)]
            return own_tests(path) or its or _nearest(path)
    return []


def own_tests(path: Path) -> list[Path]:
    """The test modules named after a module of the package."""
    place = Path(*path.parent.parts[2:]) / path.stem
    if place.name == "__init__":
        place = place.parent
    folders = SHARED.get(place.parent.as_posix(), (place.parent,))
    return [test for folder in folders for test in _modules(Path("tests", folder), place.name)]


def modules_in(place: Path) -> list[Path]:
    """The test modules of a folder, or the one that is given."""
    found = [place] if place.suffix else sorted(place.glob("test_*.py"))
    return [path.relative_to(ROOT) for path in found if path.is_file()]


def _nearest(path: Path) -> list[Path]:
    """The test modules of the nearest folder above a module that has any."""
    place = Path("tests", *path.parent.parts[2:])
    while not (named := _modules(place.parent, place.name) or _modules(place, "")):
        place = place.parent
    return named


def _modules(folder: Path, stem: str) -> list[Path]:
    patterns = (f"test_{stem}.py", f"test_{stem}_*.py") if stem else ("test_*.py",)
    matches = [path for pattern in patterns for path in (ROOT / folder).glob(pattern)]
    return sorted(path.relative_to(ROOT) for path in matches)


def pytest_check(changed: Iterable[Path], budget: float) -> Check:
    smoke = [name for name in SMOKE if (ROOT / name).is_file()]
    named = dict.fromkeys(str(test) for path in changed for test in tests_of(path))
    mirrored = [name for name in named if name not in smoke]
    modules = [*smoke, *mirrored[:MAX_MIRRORED]]
    return Check(
        f"pytest: {len(smoke)} smoke modules, {len(modules) - len(smoke)} of {len(mirrored)} of "
        "changed files",
        (f"{BIN}/python", "-m", "pytest", "-q", "-n", "2", *modules),
        {"TILEWORK_TEST_SECONDS": str(budget)},
    )


def _report(checks: Iterable[Check]) -> Iterator[bool]:
    """Run all at once; print each as it was asked for, with its output if it failed."""
    checks = list(checks)
    with ThreadPoolExecutor(len(checks)) as pool:
        for check, run in [(check, pool.submit(check.run)) for check in checks]:
            status, seconds, output = run.result()
            lines = output.strip().split("\n")
            print(f"{'ok  ' if status == 0 else 'FAIL'} {seconds:5.1f} s  {check.name}", flush=True)
            if status or "pytest" in check.name:
                print(*(f"     {line}" for line in (lines if status else lines[-1:])), sep="\n")
            yield status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lint", action="store_true", help="linters and types, no tests")
    parser.add_argument("--since", help="a commit (default: where the upstream branch was left)")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds for tests to begin in"
    )
    options = parser.parse_args()
    start = time.monotonic()
    checks = linters()
    if not options.lint:
        checks.insert(0, pytest_check(changed_files(options.since), options.budget))
    good = list(_report(checks))
    print(f"     {time.monotonic() - start:5.1f} s  in all")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
