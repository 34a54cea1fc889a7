"""The core's interleavings, drawn by seeds; ``make simulate`` has them by the thousand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.csrc.simulation.build import ROOT, build

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("nm")), reason="cmake or nm is not installed"
    ),
    pytest.mark.timeout(600),  # the first one compiles the core
]

#: Functions of the C library that neither wait, read a clock, nor reach another process: they are
#: called as they are. All others that the core calls have a counterpart in tests/csrc/simulation.
PLAIN = re.compile(
    "access|fallocate|fclose|fcntl|fread|fstat|ftruncate|getenv|getrlimit|madvise|mem(chr|cmp)|"
    "memfd_create|open|pread|pthread_(atfork|once)|pwrite|snprintf|stat|str(error|n?len|n?cmp|r?chr|to[a-z]+)"
)
RUNTIME = re.compile(
    r"_Z|__cxa_|_Unwind_|__tsan_|__gxx_|_GLOBAL_OFFSET|__\w+di2$|__errno_location$"
)
RUNTIME_DATA = {"__libc_single_threaded", "__once_proxy", "__dso_handle", "__stack_chk_fail"}


@pytest.fixture(scope="module")
def program() -> Path:
    return build()


def run(program: Path, *arguments: str) -> str:
    # A sanitizer that this Python runs under has no business there, and does not know fibers.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_random_interleavings(program: Path) -> None:
    assert "nothing wrong" in run(program, "--trials", "400")


def test_a_seed_is_an_interleaving(program: Path) -> None:
    first = run(program, "--seed", "6", "--events", "1000")
    assert first.count("\n") > 500
    assert run(program, "--seed", "6", "--events", "1000") == first


def called_functions(objects: list[Path]) -> set[str]:
    listing = subprocess.run(["nm", "-u", *objects], capture_output=True, text=True, check=True)
    names = set(re.findall(r"^ +U (\w+)", listing.stdout, re.MULTILINE))
    return {name for name in names if not RUNTIME.match(name)} - RUNTIME_DATA


def test_functions_that_wait_are_simulated(program: Path) -> None:
    objects = [
        *(program.parent / "CMakeFiles/simulated.dir/Unity").glob("*.o"),
        *(program.parent / "CMakeFiles/simulated.dir/csrc").rglob("*.o"),
    ]
    simulated = {
        name.removeprefix("__wrap_")
        for file in ("system.cpp", "instrumentation.cpp")
        for name in re.findall(
            r"^\w[\w ]*?[ *]+(\w+)\(",
            (ROOT / "tests/csrc/simulation" / file).read_text(),
            re.MULTILINE,
        )
    }
    called = called_functions(objects)
    assert {"syscall", "sched_yield"} <= called & simulated  # the objects are those of the core
    unknown = called - simulated
    assert not {name for name in unknown if not PLAIN.fullmatch(name)}, (
        "tests/csrc/simulation/system.cpp needs a counterpart of these if they wait, read a clock"
        " or reach another process; if not, name them in PLAIN above"
    )
