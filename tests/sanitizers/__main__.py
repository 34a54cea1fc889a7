"""Build the core with sanitizers and run its tests on it: ``python -m tests.sanitizers``.

One line per sanitizer; exits with 1 if any of them had anything to report, or a test failed. The
builds have their own directories under build/sanitize, and nothing that is installed is touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: Ranks as threads on the core.
ON_THREADS = (
    "tests/csrc",
    # It ends with a fault on purpose, which is a report.
    "--deselect=tests/csrc/collectives/test_peer_memory.py::test_unmapped_memory_ends_its_owner_alone",
    "tests/comm/test_contract.py::TestShmBetweenThreads",
    "tests/comm/test_contract.py::TestShmSingleCopy",
    "tests/comm/operations/test_collectives_properties.py::test_random_programs_on_shm",
    "tests/comm/backends/shm/test_shm_group_fast_path.py::test_what_only_moves_may_be_in_rows",
    "tests/comm/backends/shm/test_shm_group_fast_path.py::test_rows_within_each_other",
    "tests/chaos/test_random_faults.py::test_every_fault[shm-threads]",
)
#: Also as processes, which the thread sanitizer cannot see together.
PROCESSES = (
    *ON_THREADS,
    "tests/comm/test_contract.py::TestShmBetweenProcesses",
    "tests/comm/operations/test_collectives_properties.py::test_random_programs_between_processes",
    "tests/chaos/test_random_faults.py::test_every_fault[shm]",
)
#: Without garbage, which is written behind every rule, in forks, whose threads cannot be followed.
THREADS = (*ON_THREADS, "--ignore=tests/csrc/transport/test_segment_garbage.py")


@dataclass(frozen=True)
class Sanitizer:
    """A way to build the core, and what to run on it."""

    #: For TILEWORK_SANITIZE.
    flags: str
    #: Runtime libraries that must be there before Python, which is not built with them.
    preloaded: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.flags.partition(",")[0]

    @property
    def build(self) -> Path:
        return ROOT / "build" / "sanitize" / self.name

    def options(self, reports: Path) -> dict[str, str]:
        """What the runtimes read from the environment."""
        log = f"log_path={reports / self.name}"
        return {
            # Python keeps much until the end, on purpose.
            "ASAN_OPTIONS": f"{log}:detect_leaks=0",
            "UBSAN_OPTIONS": f"{log}:print_stacktrace=1",
            "TSAN_OPTIONS": f"{log}:halt_on_error=0:suppressions={HERE / 'tsan.supp'}",
        }


SANITIZERS = (
    # libstdc++ too: the runtime looks for what it is to intercept before Python has loaded it.
    Sanitizer("address,undefined", ("libasan.so", "libstdc++.so"), PROCESSES),
    Sanitizer("thread", ("libtsan.so",), THREADS),
)


def library(name: str) -> str:
    """The full path of one of the compiler's libraries."""
    found = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not os.path.isabs(found):
        raise SystemExit(f"the compiler has no {name}: install its sanitizer libraries")
    return found


def build(sanitizer: Sanitizer) -> Path:
    """Build the core; return the module."""
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(sanitizer.build)),
        *(["-G", "Ninja"] if shutil.which("ninja") else []),
        *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DTILEWORK_SANITIZE={sanitizer.flags}"),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (configure, ["cmake", "--build", str(sanitizer.build)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{' '.join(command)} failed")
    return sanitizer.build / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def test(sanitizer: Sanitizer, module: Path, extra: list[str]) -> tuple[str, list[Path]]:
    """Run the tests; return pytest's last line, and the reports."""
    reports = sanitizer.build / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    environment = {
        **os.environ,
        **sanitizer.options(reports),
        "LD_PRELOAD": ":".join(library(name) for name in sanitizer.preloaded),
        "TILEWORK_TEST_CORE": str(module),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        # torch's own threads would be reported: nothing of torch is built with the sanitizer.
        "OMP_NUM_THREADS": "1",
    }
    pytest = [
        *(sys.executable, "-m", "pytest", "-p", "tests.sanitizers.core", "-q", "--timeout=300"),
        *("-p", "no:cacheprovider", *sanitizer.tests, *extra),
    ]
    # Without random addresses: the thread sanitizer fails on some.
    done = subprocess.run(
        ["setarch", "-R", *pytest],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["pytest said nothing"]
    return (f"FAILED ({lines[-1]})" if done.returncode else lines[-1]), sorted(reports.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sanitize", description=__doc__)
    names = [sanitizer.name for sanitizer in SANITIZERS]
    parser.add_argument("only", nargs="*", help=f"of {names}; all unless given")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="handed to pytest")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(names):
        parser.error(f"unknown: {sorted(unknown)}; there are {names}")
    bad = False
    for sanitizer in SANITIZERS:
        if arguments.only and sanitizer.name not in arguments.only:
            continue
        start = time.monotonic()
        outcome, reports = test(sanitizer, build(sanitizer), arguments.pytest)
        for report in reports:
            print(report.read_text(errors="replace"))
        bad |= bool(reports) or outcome.startswith("FAILED")
        seconds = time.monotonic() - start
        print(f"{sanitizer.flags}: {len(reports)} reports; {outcome} ({seconds:.0f} s in all)")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
