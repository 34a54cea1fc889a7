"""A rank's part in a trial: it makes the groups, runs the program, and tells what it saw."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch

import tilework.distributed as dist
from tests.chaos.plan import AT_ODDS, EARLY, LATE, Batch, Trial
from tests.faults.forked_ranks import Holdings
from tests.faults.workload import SeenError
from tests.random_programs import OPERATIONS, RandomOperation, Started
from tilework.comm.world import AnyGroup
from tilework.testing.groups.values import Case, assert_same

#: In groups that must not fail.
PATIENCE = timedelta(seconds=120)
#: How long ranks look for a fault once their program is over.
LOOKING_SECONDS = 15.0
BARRIER = RandomOperation("barrier", Case((), torch.float32), 0, "SUM", False, 0)
TAIL = RandomOperation("all_reduce", Case((3000,), torch.float32), 0, "SUM", False, 1)


@dataclass(frozen=True)
class Setting:
    """On what a trial runs."""

    backend: str
    #: Called once in each rank's process.
    prepare: Callable[[], object] = int


@dataclass
class Report:
    """What a rank saw."""

    #: By group.
    errors: dict[int, SeenError] = field(default_factory=dict)
    #: What one more call in a failed group raised.
    again: dict[int, str] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    #: The error by which the groups could not be made.
    unmade: SeenError | None = None
    #: The traceback of what should not have happened.
    broken: str = ""
    left_early: bool = False


class FaultRaised(Exception):
    """What the victim's own program raises."""


class RankProgram:
    """One rank in one trial."""

    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial = trial
        self.rank = rank
        self.report = Report()
        self.is_victim = rank in trial.fault.victims
        self._groups: list[AnyGroup] = []
        self._struck = False

    def play(self, setting: Setting, store: dist.Store, ready: Callable[[], object]) -> Report:
        """All of it; the groups are left in the end."""
        try:
            self._join(setting, store)
            ready()
            self._program()
            for group in list(self.report.errors):
                self._call_again(group)
        except FaultRaised:
            self.report.left_early = True
        except dist.DistError as error:
            self.report.unmade = seen_error(error)
        except BaseException:
            self.report.broken = traceback.format_exc()
        finally:
            if self._struck_by_signal or self._ticking:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return self.report

    def end(self) -> None:
        """Leave the groups, as a program's end does."""
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- the groups ----------------------------------------------------------------------

    def _join(self, setting: Setting, store: dist.Store) -> None:
        trial = self.trial
        dist.init_process_group(
            setting.backend,
            store=store,
            rank=self.rank,
            world_size=trial.n,
            timeout=self._limit(0),
        )
        self._groups = [None]
        for index, ranks in enumerate(trial.groups[1:], 1):
            limit = self._limit(index)
            self._groups.append(dist.new_group(ranks, limit))

    def _limit(self, group: int) -> timedelta:
        doomed = group in self.trial.doomed or self.trial.fault.kind in EARLY
        return timedelta(seconds=self.trial.timeout) if doomed else PATIENCE

    # -- the program ---------------------------------------------------------------------

    def _program(self) -> None:
        if self._struck_by_signal:
            self._arm()
        elif self._ticking:
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        for number, batch in enumerate(self.trial.batches):
            if self.rank not in self.trial.groups[batch.group]:
                continue
            if self.is_victim and number == self.trial.fault.at:
                batch = self._act(batch)
            self._run(batch)
        self._look()

    def _look(self) -> None:
        """Go on in the doomed groups until each has failed.

        Signals come from another process, which may be late: the ranks may have made their groups
        and be through with their program when one is killed "while the groups are made".
        """
        doomed = [g for g in self.trial.doomed if self.rank in self.trial.groups[g]]
        deadline = time.monotonic() + LOOKING_SECONDS
        while time.monotonic() < deadline and any(g not in self.report.errors for g in doomed):
            for group in doomed:
                self._run(Batch(group, (TAIL,)))

    def _run(self, batch: Batch) -> None:
        """A batch, unless its group has failed."""
        if self._struck:
            raise FaultRaised
        if batch.group in self.report.errors:
            return
        under_way = []
        try:
            for step in batch.steps:
                under_way.append((step, self._start(batch.group, step)))
        except dist.DistBackendError as error:
            self.report.errors[batch.group] = seen_error(error)
        for step, started in under_way:
            self._finish(batch.group, step, started)

    def _start(self, group: int, step: RandomOperation) -> Started:
        ranks = self.trial.groups[group]
        start = OPERATIONS[step.operation]
        return start(step, ranks.index(self.rank), len(ranks), self._groups[group])

    def _finish(self, group: int, step: RandomOperation, started: Started) -> None:
        try:
            if started.work is not None:
                started.work.wait()
        except dist.DistBackendError as error:
            self.report.errors.setdefault(group, seen_error(error))
            return
        for output, expected in zip(started.outputs, started.expected, strict=True):
            assert_same(output, expected, step)
        self.report.operations[step.operation] += 1

    def _call_again(self, group: int) -> None:
        try:
            self._start(group, BARRIER)
            self.report.again[group] = "nothing"
        except dist.DistBackendError as error:
            self.report.again[group] = type(error).__name__

    # -- what the victim does ------------------------------------------------------------

    @property
    def _struck_by_signal(self) -> bool:
        return self.is_victim and self.trial.fault.kind == "interrupt"

    @property
    def _ticking(self) -> bool:
        """Python takes signals on main threads only."""
        return self.trial.ticking and threading.current_thread() is threading.main_thread()

    def _arm(self) -> None:
        def strike(number: int, frame: FrameType | None) -> None:
            self._struck = True
            raise FaultRaised

        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, max(self.trial.fault.after, 1e-5))

    def _act(self, batch: Batch) -> Batch:
        """Misbehave; return what to run instead of ``batch``."""
        fault = self.trial.fault
        if fault.kind == "exit":
            os._exit(0)
        if fault.kind == "raise":
            for step in batch.steps:
                self._start(batch.group, step)
        if fault.kind in ("leave", "raise", "vanish"):
            raise FaultRaised
        if fault.kind in ("late", "hesitate"):
            time.sleep(self.trial.timeout + 0.7 if fault.kind in LATE else fault.after)
        if fault.kind not in AT_ODDS:
            return batch
        calls = () if fault.call is None else (fault.call,)
        return Batch(batch.group, (*calls, *batch.steps) if fault.kind == "extra" else calls)


def seen_error(error: dist.DistError) -> SeenError:
    ranks = getattr(error, "ranks", ())
    return SeenError(type(error), str(error), ranks, time.monotonic())


@dataclass(frozen=True)
class Restart:
    """How it went on afterwards: the sum in a new group, and what is held that was not before."""

    total: float
    before: Holdings
    after: Holdings


def sum_after_restart(setting: Setting, store: dist.Store, rank: int, size: int) -> float:
    """The sum of 1, 2, … in a new group of those that are left."""
    dist.init_process_group(
        setting.backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    store.close()
    return total.item()


def settled(before: Holdings, seconds: float = 2.0) -> Holdings:
    """What is held once threads that were told to end have ended."""
    deadline = time.monotonic() + seconds
    while not (now := Holdings.now()).within(before) and time.monotonic() < deadline:
        time.sleep(0.005)
        gc.collect()
    return now
