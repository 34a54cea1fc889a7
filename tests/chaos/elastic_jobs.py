"""Short jobs whose ranks are killed at random moments: ``python -m tests.chaos.elastic_jobs``.

Each job trains a small model in one of the layouts on some processes, and kills some of them with
SIGKILL, whatever they are doing: computing, copying, agreeing on who is left, restoring. Those that
are left must have trained every step, once, with the losses of an undisturbed run.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from tests.parallel.resilient.programs import BUILDS, make_loop
from tilework.errors import RankFailedError
from tilework.testing import run_ranks

STEPS = 12


@dataclass(frozen=True)
class Job:
    """A job that can be run again: all of it follows from its seed."""

    seed: int
    kind: str
    size: int
    #: Seconds after which a rank is killed, by rank.
    kills: dict[int, float]

    @staticmethod
    def draw(seed: int) -> Job:
        """The job of a seed."""
        draw = random.Random(seed)
        size = draw.choice([2, 3, 4, 5])
        victims = draw.sample(range(size), draw.randint(1, size - 1))
        latest = draw.choice([0.05, 0.3, 0.8])
        return Job(
            seed,
            draw.choice(list(BUILDS)),
            size,
            {victim: draw.uniform(0, latest) for victim in victims},
        )

    def run(self, expected: list[float]) -> tuple[int, str]:
        """The number of ranks that were killed in time, and what went wrong; "" if nothing."""

        def program(rank: int) -> list[tuple[int, float]]:
            if rank in self.kills:
                threading.Thread(target=die, args=(self.kills[rank],), daemon=True).start()
            return list(make_loop(self.kind, lambda number: time.sleep(0.005)).run(STEPS))

        results: list[Any] = run_ranks(self.size, program, kind="processes", return_exceptions=True)
        killed = 0
        for rank, result in enumerate(results):
            if rank in self.kills and isinstance(result, RankFailedError):
                killed += result.exitcode == -signal.SIGKILL
            elif isinstance(result, BaseException):
                return killed, f"rank {rank} failed: {result!r}"
            elif [number for number, _ in result] != list(range(STEPS)):
                return killed, f"rank {rank} trained the steps {[number for number, _ in result]}"
            elif not all(
                math.isclose(loss, e, rel_tol=1e-3)
                for (_, loss), e in zip(result, expected, strict=True)
            ):
                return killed, f"rank {rank} has the losses {result}, not {expected}"
        return killed, ""


def die(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(kind: str) -> list[float]:
    """In a process: torch's autograd, once used, does not survive a fork."""

    def program(rank: int) -> list[float]:
        return [loss for _, loss in make_loop(kind, lambda number: None).run(STEPS)]

    return run_ranks(1, program, kind="processes")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, help="how many, in all jobs together")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; the rest follow")
    parser.add_argument("--jobs", type=int, default=10_000, help="at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])  # loads what ranks would load each
    expected = {kind: undisturbed(kind) for kind in BUILDS}
    kills = failures = jobs = 0
    begun = time.monotonic()
    while kills < options.kills and jobs < options.jobs:
        job = Job.draw(options.seed + jobs)
        killed, wrong = job.run(expected[job.kind])
        jobs, kills = jobs + 1, kills + killed
        if wrong:
            failures += 1
            print(f"{job}: {wrong}", flush=True)
        if jobs % 25 == 0:
            print(f"{jobs} jobs, {kills} kills, {failures} failures", flush=True)
    seconds = time.monotonic() - begun
    print(f"{jobs} jobs, {kills} ranks killed, {failures} failures, {seconds:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
