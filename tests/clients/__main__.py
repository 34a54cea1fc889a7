"""Each client's program on Gloo and on tilework, with equal values: ``make clients``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.clients.program import BACKENDS, MARK

FOLDER = Path(__file__).parent
#: By program, with an argument if there is one, the packages, whose versions are printed.
PROGRAMS = {
    "fabric": ("lightning",),
    "trainer": ("lightning", "torchmetrics"),
    "metrics": ("torchmetrics",),
    "accelerate_scripts:test_ops": ("accelerate",),
    "accelerate_scripts:test_script": ("accelerate",),
    "accelerate_scripts:test_sync": ("accelerate",),
    "transformers_trainer": ("transformers", "accelerate"),
    "deepspeed_zero": ("deepspeed",),
    "ray_train": ("ray",),
    "pipelines": ("torch",),
}
#: Programs that start their ranks themselves.
STARTING = ("ray_train",)
LIMIT_SECONDS = 600


def values(program: str, backend: str) -> list[Any]:
    """The values that the ranks of a program report, in order.

    Raises:
        RuntimeError: The program failed.
    """
    name, *arguments = program.split(":")
    launcher = [] if name in STARTING else ["-m", "tilework", "run", "--tcp", "-n", "2"]
    paths = os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / f"{name}.py"), backend, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}"[-4000:])
    found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    return [json.loads(each) for each in sorted(set(found))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients ARGS=…", description=__doc__)
    parser.add_argument("programs", nargs="*", default=[*PROGRAMS], help="; by default all")
    wrong = 0
    for program in parser.parse_args().programs:
        named = " ".join(f"{each} {metadata.version(each)}" for each in PROGRAMS[program])
        start = time.monotonic()
        try:
            gloo, ours = (values(program, backend) for backend in BACKENDS)
            said = "equal" if gloo and gloo == ours else f"differs:\n  {gloo}\n  {ours}"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            said = f"failed: {error}"
        wrong += said != "equal"
        print(f"{program} ({named}), {time.monotonic() - start:.0f} s: {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
