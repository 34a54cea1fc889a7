"""Each client's program on Gloo and on tilework, with equal values: ``make clients``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.clients.program import BACKENDS, MARK

FOLDER = Path(__file__).parent
#: By program, with an argument if there is one: the packages, whose versions are printed, and the
#: parts of them that run.
PROGRAMS = {
    "fabric": ("lightning", "Fabric, DDP"),
    "trainer": ("lightning", "Trainer, DDP and fully_shard, logged metrics"),
    "metrics": ("torchmetrics", "a collection, unequal numbers of rows"),
    "accelerate_scripts:test_ops": ("accelerate", "its own test_ops"),
    "accelerate_scripts:test_script": ("accelerate", "its own test_script"),
    "accelerate_scripts:test_sync": ("accelerate", "its own test_sync"),
    "accelerate_loop": ("accelerate", "gather_for_metrics, save_state, load_state"),
    "transformers_trainer": ("transformers accelerate", "Trainer, DDP, saved and resumed"),
    "peft_lora": ("peft transformers", "LoRA, DDP and fully_shard"),
    "deepspeed_zero": ("deepspeed", "ZeRO 1, 2 and 3"),
    "ray_train": ("ray", "TorchTrainer, DDP"),
    "pipelines": ("torch", "GPipe and 1F1B, traced and by hand"),
}
#: Programs that start their ranks themselves.
STARTING = ("ray_train",)
#: Nothing is fetched, and nobody is told.
OFFLINE = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
LIMIT_SECONDS = 600
Row = tuple[str, str, str, str, str]


def values(program: str, backend: str) -> list[Any]:
    """The values that the ranks of a program report, in order.

    Raises:
        RuntimeError: The program failed.
    """
    name, *arguments = program.split(":")
    launcher = [] if name in STARTING else ["-m", "tilework", "run", "-n", "2"]
    paths = os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launcher, str(FOLDER / f"{name}.py"), backend, *arguments],
            env={
                **os.environ,
                **OFFLINE,
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": folder,
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}"[-4000:])
    found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if not found:
        raise RuntimeError("it reported no values")
    return [json.loads(each) for each in sorted(set(found))]


def difference(gloo: Any, ours: Any, place: str = "values") -> str:
    """The first place where two values differ, and both; empty if they are equal."""
    if isinstance(gloo, (list, dict)) and type(gloo) is type(ours) and len(gloo) == len(ours):
        keys = gloo if isinstance(gloo, dict) else range(len(gloo))
        missing = next((key for key in keys if isinstance(ours, dict) and key not in ours), None)
        if missing is not None:
            return f"{place} lacks {missing!r}"
        each = (difference(gloo[key], ours[key], f"{place}[{key!r}]") for key in keys)
        return next(filter(None, each), "")
    return "" if repr(gloo) == repr(ours) else f"{place}: {gloo!r} on Gloo, {ours!r} on tilework"


def row(program: str) -> Row:
    """The line of a program: client, versions, the part that ran, outcome, seconds."""
    packages, part = PROGRAMS[program]
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in packages.split())
    start = time.monotonic()
    try:
        gloo, ours = (values(program, backend) for backend in BACKENDS)
        outcome = difference(gloo, ours) or "equal"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{program}: {error}", flush=True)
        outcome = "failed, see above"
    return program, versions, part, outcome, f"{time.monotonic() - start:.0f} s"


def table(rows: Sequence[Row]) -> str:
    """Rows with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, each, widths)).rstrip() for each in rows)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients ARGS=…", description=__doc__)
    parser.add_argument("programs", nargs="*", help=f"; by default all: {' '.join(PROGRAMS)}")
    programs = parser.parse_args().programs or [*PROGRAMS]
    if unknown := [each for each in programs if each not in PROGRAMS]:
        parser.error(f"no program {', '.join(unknown)}: choose from {', '.join(PROGRAMS)}")
    rows = []
    for program in programs:
        rows.append(row(program))
        print(*rows[-1], sep="  ", flush=True)
    wrong = sum(each[3] != "equal" for each in rows)
    print(f"\nOn Gloo and on tilework, with torch {metadata.version('torch')}, 2 ranks:\n")
    print(table([("client", "versions", "what ran", "values", "time"), *rows]))
    print(f"\n{len(rows) - wrong} of {len(rows)} equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
