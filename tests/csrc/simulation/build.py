"""The simulation of the core (tests/csrc/simulation), built where it is asked for."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


class CannotBuildError(Exception):
    """There is no compiler, or the sources do not compile."""


def build(source: Path = ROOT) -> Path:
    """The program for the sources in this folder; compiled if something has changed."""
    folder = source / "build" / "simulation"
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("cmake"):
        raise CannotBuildError("cmake is not installed")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if (folder / "CMakeCache.txt").exists():
        generator = []  # the one that it was configured with
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-DTILEWORK_SIMULATION=ON"]
    # Compilers are quick without the sanitizer that this Python may run under.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ([*configure, *generator], ["cmake", "--build", str(folder), "-j", "2"]):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise CannotBuildError(done.stdout + done.stderr)
    return folder / "simulate"
