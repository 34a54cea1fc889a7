"""Trials on forked processes that go on from trial to trial; one that is gone is forked anew."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TypeVar

import torch

import tilework.distributed as dist
from tests.chaos.expected import Outcome
from tests.chaos.plan import EARLY, Trial
from tests.chaos.rank_program import (
    RankProgram,
    Report,
    Restart,
    Setting,
    settled,
    sum_after_restart,
)
from tests.faults.forked_ranks import ForkedRanks, Holdings, Say

T = TypeVar("T")

MOST_RANKS = 4
HEARING_SECONDS = 40.0


@dataclass(frozen=True)
class Turn:
    """What a rank is told to take part in."""

    trial: Trial
    folder: Path


class Processes:
    """Ranks that play trial after trial. None outlives the ``with`` block."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting = setting
        self._folder = folder
        #: To each rank, the turns that it is to take.
        self._orders: list[tuple[Connection, Connection]] = [
            Pipe(duplex=False) for _ in range(MOST_RANKS)
        ]
        self._ranks = ForkedRanks(MOST_RANKS, self._serve)

    def __enter__(self) -> Processes:
        self._ranks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
        self._ranks.__exit__(None, None, None)
        for reader, writer in self._orders:
            reader.close()
            writer.close()

    def run(self, trial: Trial) -> Outcome:
        """One trial."""
        outcome = Outcome(trial)
        folder = self._folder / str(trial.seed)
        folder.mkdir()
        try:
            self._play(trial, folder, outcome)
        except Exception:
            outcome.trouble = traceback.format_exc()
            self._start_over()
        shutil.rmtree(folder)
        return outcome

    # -- in the driver -------------------------------------------------------------------

    def _play(self, trial: Trial, folder: Path, outcome: Outcome) -> None:
        for rank in range(trial.n):
            self._orders[rank][1].send(Turn(trial, folder))
        if trial.fault.kind not in EARLY:
            for rank in range(trial.n):
                said = self._ranks[rank].hear(HEARING_SECONDS)
                if isinstance(said, Report):
                    raise RuntimeError(f"rank {rank} could not make the groups: {said}")
        self._strike(trial, outcome)
        for rank in self._staying(trial):
            outcome.reports[rank] = self._next(rank, Report)
        if trial.fault.kind == "stop":
            for victim in trial.fault.victims:
                self._ranks[victim].kill(signal.SIGCONT)
                outcome.reports[victim] = self._next(victim, Report)
        for rank in range(trial.n):
            if rank in trial.gone:
                self._replace(rank)
            else:
                outcome.restarts[rank] = self._next(rank, Restart)

    def _staying(self, trial: Trial) -> Iterator[int]:
        """Ranks that report without the driver's help."""
        absent = trial.fault.victims if trial.fault.kind == "stop" else trial.gone
        return (rank for rank in range(trial.n) if rank not in absent)

    def _next(self, rank: int, kind: type[T]) -> T:
        while not isinstance(said := self._ranks[rank].hear(HEARING_SECONDS), kind):
            pass  # it was ready
        return said

    def _strike(self, trial: Trial, outcome: Outcome) -> None:
        fault = trial.fault
        numbers = {"stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
        if fault.kind in ("kill", "kill two", "kill early", *numbers):
            time.sleep(fault.after)
            number = numbers.get(fault.kind, signal.SIGKILL)
            outcome.struck = max(self._ranks[victim].kill(number) for victim in fault.victims)
        if fault.kind == "exit":
            self._ranks[fault.victims[0]].reap(HEARING_SECONDS)
            outcome.struck = time.monotonic()
        if fault.kind == "pause":
            time.sleep(5 * fault.after)
            self._ranks[fault.victims[0]].kill(signal.SIGCONT)

    def _replace(self, rank: int) -> None:
        """A new process, with a new pipe: the old one may hold an order that was not read."""
        for end in self._orders[rank]:
            end.close()
        self._orders[rank] = Pipe(duplex=False)
        self._ranks.replace(rank)

    def _start_over(self) -> None:
        """After trouble nobody knows where the ranks are."""
        for rank in range(MOST_RANKS):
            self._ranks[rank].kill(signal.SIGKILL)
            self._replace(rank)

    # -- in a rank -----------------------------------------------------------------------

    def _serve(self, rank: int, say: Say) -> None:
        self._setting.prepare()
        warm_up(self._setting)
        while True:
            turn = self._orders[rank][0].recv()
            before = Holdings.now()
            store = dist.FileStore(os.fspath(turn.folder / "first"))
            part = RankProgram(turn.trial, rank)
            report = part.play(self._setting, store, lambda: say("ready"))
            part.end()
            store.close()
            say(report)
            left = [r for r in range(turn.trial.n) if r not in turn.trial.gone]
            again = dist.FileStore(os.fspath(turn.folder / "second"))
            total = sum_after_restart(self._setting, again, left.index(rank), len(left))
            say(Restart(total, before, settled(before)))


def warm_up(setting: Setting) -> Holdings:
    """Have a group once, so that only what every further group leaves behind counts."""
    with dist.HashStore() as store:
        dist.init_process_group(setting.backend, store=store, rank=0, world_size=1)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group()
    now = Holdings.now()
    return settled(now)
