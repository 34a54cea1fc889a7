"""Trials by the thousand: ``make chaos ARGS="--seconds 300"``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from tests.chaos.environments import ENVIRONMENTS, environment, replay
from tests.chaos.life_plan import draw_life
from tests.chaos.life_statistics import LifeStatistics
from tests.chaos.life_trials import Lives
from tests.chaos.plan import WORDS, draw_trial
from tests.chaos.statistics import Statistics
from tests.faults.workload import warm_up


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=…", description=__doc__)
    parser.add_argument("--on", nargs="*", default=[*ENVIRONMENTS, *LIVES], choices=PLACES)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; the rest follow")
    parser.add_argument("--trials", type=int, default=1_000_000, help="on each, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="on each, at most")
    parser.add_argument("--faults", nargs="*", default=[], choices=list(WORDS), metavar="FAULT")
    parser.add_argument("--verbose", action="store_true", help="print each trial's program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, bad = Console(), False
    for name in arguments.on:
        if name in LIVES:
            bad |= run_lives(name, arguments, console)
            continue
        statistics = run(name, arguments, console)
        console.print(statistics.table(f"{name}, seeds from {arguments.seed}"))
        faults = chosen_faults(name, arguments.faults)
        for outcome in statistics.failed:
            console.print(
                f"{outcome.trial}\n{replay(name, outcome.trial.seed, faults)}", markup=False
            )
            console.print("\n".join(outcome.violations()), markup=False)
        bad |= bool(statistics.failed)
    return int(bad)


#: Whole lives, from the import to the end: of forked ranks, or of those of a launcher.
LIVES = ("lives", "launched")
PLACES = [*ENVIRONMENTS, *LIVES]


def run_lives(name: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Lives, until there are enough; true if one went wrong."""
    warm_up()
    statistics = LifeStatistics()
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        lives = Lives(Path(folder))
        for seed in range(arguments.seed, arguments.seed + arguments.trials):
            if time.monotonic() > deadline:
                break
            outcome = lives.run(draw_life(seed, name == "launched"))
            statistics.add(outcome)
            if violations := outcome.violations():
                again = f'again: make chaos ARGS="--on {name} --seed {seed} --trials 1"'
                console.print("\n".join([str(outcome.life), again, *violations]), markup=False)
    console.print(statistics.table(f"{name}, seeds from {arguments.seed}"))
    return bool(statistics.failed)


def chosen_faults(name: str, wanted: list[str]) -> tuple[str, ...]:
    """Those of ``wanted`` that there can be; all for none."""
    return tuple(fault for fault in ENVIRONMENTS[name].faults if not wanted or fault in wanted)


def run(name: str, arguments: argparse.Namespace, console: Console) -> Statistics:
    """Trials in one environment, until there are enough."""
    statistics, faults = Statistics(), chosen_faults(name, arguments.faults)
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder, environment(name, Path(folder)) as place:
        for seed in range(arguments.seed, arguments.seed + arguments.trials):
            if time.monotonic() > deadline:
                break
            trial = draw_trial(seed, faults)
            if arguments.verbose:
                console.print(str(trial), markup=False)
            statistics.add(place.run(trial))
    return statistics


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
