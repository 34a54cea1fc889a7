"""``Resilient``: a training loop that continues when ranks are lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.groups import grow_group, note_event, shrink_group, tickets_waiting
from tilework.comm.launching import MIN_RANKS_VARIABLE
from tilework.comm.operations.internal import agree, all_reduce, barrier
from tilework.comm.per_call.internal import logger
from tilework.comm.world import current_world, get_default_group, get_default_store
from tilework.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    PeerLostError,
)
from tilework.parallel.resilient.restore import HeldSnapshot, find, restore
from tilework.parallel.resilient.snapshots import Snapshots
from tilework.parallel.resilient.tracked import State

#: The reasons to stop, as text, the strongest last; the first is none. Ranks exchange the numbers.
REASONS: Final = ("", "the time limit", "SIGTERM")
_TIME_LIMIT, _SIGTERM = 1, 2


class Stopping:
    """The wish of this rank to stop, at the latest after ``limit``. Ranks agree on it in
    each step.
    """

    def __init__(self, limit: timedelta | None) -> None:
        self._deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        self._wish = 0

    @property
    def wish(self) -> int:
        """The number of this rank's reason to stop; 0 for none."""
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        return max(self._wish, _TIME_LIMIT if is_over else 0)

    def keep(self, reason: str) -> None:
        """Adopt a reason that other ranks have."""
        self._wish = max(self._wish, REASONS.index(reason))

    @contextlib.contextmanager
    def listening(self, warning: Callable[[], str]) -> Iterator[None]:
        """A context in which SIGTERM is a wish to stop; only in the main thread. ``warning`` gives
        the line for stderr at the signal, "" for none.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._wish = _SIGTERM
            # Not print: it raises if the signal interrupted another print.
            os.write(2, warning().encode())

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


T = TypeVar("T")

#: Seconds between checks for ranks that wait to be let in.
_LOOK_SECONDS: Final = 0.2


class Checkpoints(Protocol):
    """The last resort when no memory holds the state. A ``CheckpointManager`` fits."""

    def should_save(self, step: int, /) -> bool:
        """True if the state after ``step`` steps is to be saved; the same on all ranks."""
        ...

    def save(self, step: int, state: State, /) -> object:
        """Save the state after ``step`` steps. Collective over the default group."""
        ...

    def resume(self, into: State) -> int | None:
        """Fill the state from the last checkpoint; the steps, or None without one. Collective."""
        ...

    def wait(self) -> object:
        """Wait for a save that runs in the background; a failure raises on all ranks.
        Collective.
        """
        ...


@dataclass(frozen=True)
class Event:
    """A change of the ranks that train, or of the step that they are at."""

    #: ``time.time()`` when the change was over.
    time: float
    #: "started", "lost", "joined" or "stopped".
    kind: str
    #: The seats of the ranks that train from here on.
    seats: tuple[int, ...]
    #: The steps that are finished.
    steps: int
    #: The seconds that the change took.
    seconds: float


@dataclass
class _Counters:
    """Counters of this rank since construction, which :meth:`Resilient.statistics` returns."""

    #: The copies at the ends of steps.
    snapshots: int = 0
    #: Seconds at the ends of steps: for these copies, and to agree whether a copy is due.
    snapshot_seconds: float = 0.0
    #: The times that the loop went on after a loss of ranks; ranks that join do not count.
    recoveries: int = 0
    #: Seconds from the error of a loss until the state was filled and copied again.
    recovery_seconds: float = 0.0


class Resilient(Generic[T]):
    """A training loop that continues when ranks are lost, and when they come back.

    After each step the state is copied to memory that outlives the rank. On a single host all ranks
    share memory files, and each rank writes a part; else each rank's part goes to ``replicas``
    other ranks. When an operation raises because a rank was lost, the remaining ranks agree on who
    they are (``shrink_group``), build a new state for their number, and fill it from the last step
    that all had finished. Ranks that the launcher has started again are let in at the end of a
    step.

    Everything that communicates belongs into ``build`` and ``step``: a rank that joins later runs
    only these two.

    Args:
        build: Makes the state for the current ranks: a dict of modules, optimizers, tensors and
            objects with ``state_dict()`` and ``load_state_dict()`` (schedulers, loaders). Tensors
            have the same shapes for any number of ranks; their layouts may differ. Plain parameters
            are the same on all ranks; of plain buffers the first rank's are valid. The loop calls
            it at the start and after each change of ranks.
        step: ``step(state, number)`` trains one step and returns anything. It may run again for the
            same number, starting from the same state. With a ``DiLoCo`` in the state it may be a
            whole round; else copies, stops and newcomers wait for the end of the round.
        replicas: The number of other ranks that keep a copy of each part of the state, where ranks
            do not share memory. That many ranks may be lost at once.
        every: Copy the state after every ``every`` steps. More than 1 costs less; lost steps are
            computed again.
        shared: Whether to use shared memory where all ranks can.
        checkpoint: A ``CheckpointManager``, or an object with the methods ``save``, ``resume``,
            ``should_save`` and ``wait``. The loop begins with the last checkpoint, saves the
            checkpoints that are due and a last one when it is asked to stop, and goes back to the
            last one where memory has not all of the state. If a loss of ranks cuts off a save, the
            loop saves again.
        min_ranks: Raise if fewer ranks are left; None: as ``tilework run --elastic`` said, else 1.
        time_limit: Stop after this time: save a last checkpoint, and end the loop.
        patience: How long to wait for a rank whose process has not ended; see ``shrink_group``.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> import torch
        >>> from tilework.parallel import Resilient
        >>> from tilework.testing import run_ranks
        >>> def build():
        ...     model = torch.nn.Linear(2, 1)
        ...     return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        >>> def step(state, number):
        ...     loss = state["model"](torch.ones(1, 2)).square().sum()
        ...     state["optimizer"].zero_grad()
        ...     loss.backward()
        ...     state["optimizer"].step()
        ...     return number
        >>> run_ranks(2, lambda rank: [number for number, _ in Resilient(build, step).run(3)])
        [[0, 1, 2], [0, 1, 2]]
    """

    def __init__(
        self,
        build: Callable[[], State],
        step: Callable[[Any, int], T],
        *,
        replicas: int = 1,
        every: int = 1,
        shared: bool = True,
        checkpoint: Checkpoints | None = None,
        min_ranks: int | None = None,
        time_limit: timedelta | None = None,
        patience: timedelta | None = None,
    ) -> None:
        for name, number in (("replicas", replicas), ("every", every)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self._build, self._step = build, step
        self._replicas, self._every, self._shared = replicas, every, shared
        self._checkpoint, self._patience = checkpoint, patience
        self._least = int(os.environ.get(MIN_RANKS_VARIABLE, 1)) if min_ranks is None else min_ranks
        self._stopping = Stopping(time_limit)
        self._kept: list[Snapshots] = []
        #: The step of a due checkpoint whose save has begun and not ended; -1: none.
        self._saving = -1
        #: True between the outer steps of a DiLoCo in the state; and if a save is due after it.
        self._is_apart = self._owes_save = False
        #: True once all ranks had a copy.
        self._is_protected = False
        self._look_at = 0.0
        self._counters = _Counters()
        #: The current state.
        self.state: State = {}
        #: The steps that are finished.
        self.steps = 0
        #: The steps that were finished when the loop began; a checkpoint has them.
        self._begun = 0
        #: Changes of the ranks, oldest first.
        self.events: list[Event] = []
        #: The reason why the loop was ended early; empty if it was not.
        self.stopped = ""

    # -- the loop ----------------------------------------------------------------------------

    def run(self, steps: int) -> Iterator[tuple[int, T]]:
        """Train until ``steps`` steps are finished; yields each step's number and result.

        A second call continues with the current state. Collective; blocks. A step is yielded once,
        when all ranks have finished it and the state is safe. With ``every`` above 1, steps that
        are computed again are yielded again.

        Raises:
            ExcludedError: This rank was stopped for so long that the others went on without it.
            DistBackendError: Too few ranks are left; or memory does not hold the whole state, and
                there is no checkpoint.
        """
        with self._stopping.listening(self._warning):
            self._start()
            while True:
                while self.steps < steps and not self.stopped:
                    yield from self._advance()
                if self._guarded(barrier):  # else some were lost meanwhile
                    return

    def _start(self) -> None:
        if not self.events:
            self._guarded(self._enter_first)
        elif not self._kept:  # close() has freed the copies
            self._guarded(lambda: self._copy_anew(self.steps))

    def _enter_first(self) -> None:
        self._enter("started")
        self._begun = self.steps

    def _advance(self) -> Iterator[tuple[int, T]]:
        """Train one step, or go back to the last step that all ranks have finished."""
        number = self.steps
        results: list[T] = []
        stop, wants_growth = "", False

        def train() -> None:
            nonlocal stop, wants_growth
            results.append(self._step(self.state, number))
            stop, wants_growth = self._protect(number + 1)
            self.steps = number + 1
            if self._checkpoint is not None and self._checkpoint.should_save(self.steps):
                self._owes_save = True
            if self._owes_save and not self._is_apart and self._checkpoint is not None:
                self._owes_save = False
                self._save_due(self._checkpoint)

        self._guarded(train)
        # The loss of a rank after the copy loses no step.
        if results and self.steps == number + 1:
            yield number, results[0]
        if stop:
            self._stop(stop)
        elif wants_growth:
            self._guarded(self._grow)

    def _guarded(self, act: Callable[[], object]) -> bool:
        """Run an act of all ranks, and recover if a rank is lost; True if the act has finished."""
        return _survives(act, self._recover)

    def close(self) -> None:
        """Free the copies of the state. Local, idempotent; the state itself stays."""
        for each in self._kept:
            each.close()
        self._kept = []

    def share(self, rows: int) -> slice:
        """This rank's part of ``rows`` rows, which all ranks divide evenly. Local.

        Example:
            >>> from tilework.testing import run_ranks
            >>> loop = Resilient(dict, lambda state, number: None)
            >>> run_ranks(3, lambda rank: loop.share(8))
            [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        group = get_default_group()
        each, more = divmod(rows, group.size())
        start = group.rank() * each + min(group.rank(), more)
        return slice(start, start + each + (group.rank() < more))

    def weight(self, rows: int) -> float:
        """The factor for this rank's mean loss that makes the ranks' average the mean over all
        rows.

        1 where rows divide evenly. DistributedDataParallel averages over ranks, whatever their
        number of rows.
        """
        mine = self.share(rows)
        size = get_default_group().size()
        return float((mine.stop - mine.start) * size / rows)

    def statistics(self) -> dict[str, Any]:
        """Counters of this rank, by name: copies and recoveries, with their seconds and bytes."""
        last = self._kept[-1].catalog if self._kept else None
        mine = last.slot_bytes[self._kept[-1].rank] if last is not None else 0
        return {
            **vars(self._counters),
            "snapshot_bytes": last.total_bytes if last is not None else 0,
            "snapshot_bytes_of_this_rank": mine,
        }

    # -- copies ------------------------------------------------------------------------------

    def _protect(self, steps: int) -> tuple[str, bool]:
        """Copy the state if due; the reason to stop, or True to grow. Collective."""
        begun = time.perf_counter()
        fits = self._kept[-1].fits()
        apart = any(getattr(each, "is_apart", False) for each in self.state.values())
        flags = torch.tensor([not fits, self._stopping.wish, self._is_awaited(), apart])
        flags = flags.to(torch.uint8)
        all_reduce(flags, op=ReduceOp.MAX)
        self._settle()
        changed, stop, grow, self._is_apart = flags.tolist()
        if self._is_apart:  # copy, stop and grow when the ranks hold the same state again
            return "", False
        is_due = changed or steps % self._every == 0 or stop or grow
        if changed:
            self._copy_anew(steps)
        elif is_due:
            self._kept[-1].write(steps)
            barrier()
        self._counters.snapshots += bool(is_due)
        self._counters.snapshot_seconds += time.perf_counter() - begun
        return REASONS[stop], bool(grow)

    def _copy_anew(self, steps: int) -> None:
        """Copy a changed state; keep older copies until all have new ones. Collective."""
        world = current_world()
        known = self._kept[-1].generation if self._kept else 0
        group = get_default_group()
        seats = world.seats or tuple(range(group.size()))
        new = Snapshots(self.state, group, self._replicas, self._shared, seats, known)
        new.fits()
        new.write(steps)
        self._kept.append(new)
        barrier()
        self._is_protected = True

    def _settle(self) -> None:
        """Drop all copies but the last: by now every rank knows that the last are complete."""
        for old in self._kept[:-1]:
            old.close()
        del self._kept[:-1]

    def _is_awaited(self) -> bool:
        """True on the first rank if ranks wait to be let in."""
        group = get_default_group()
        now = time.monotonic()
        if group.rank() != 0 or now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        try:
            return tickets_waiting(group)
        except DistError:
            return False  # the store is gone; nobody can come through it

    # -- changes of ranks --------------------------------------------------------------------

    def _enter(self, kind: str) -> None:
        """Build the state for the ranks now, and fill it from a copy or checkpoint. Collective."""
        begun = time.perf_counter()
        self.state = {}
        self.state = self._build()
        group = get_default_group()
        found = find(self._kept, group)
        if found is not None:
            own = [each for each in self._kept if each.generation == found.generation]
            seats = current_world().seats or tuple(range(group.size()))
            restore(found, HeldSnapshot(own[0] if own else None), self.state, group, seats)
            self.steps = found.steps
            kind = "joined" if kind == "started" else kind
        else:
            self.steps = self._load(group)
        self._copy_anew(self.steps)
        self._note(kind, group, time.perf_counter() - begun)

    def _load(self, group: ProcessGroup) -> int:
        """Fill the state from the last checkpoint, if any; the finished steps. Collective."""
        steps = None if self._checkpoint is None else self._checkpoint.resume(self.state)
        if steps is None and any(agree(lambda: self._is_protected, group)):
            raise DistBackendError(
                f"the ranks that are left do not hold all of the state: more than "
                f"replicas={self._replicas} were lost at once, and there is no checkpoint. Pass "
                f"more replicas, or checkpoint="
            )
        return steps or 0

    def _recover(self, error: BaseException) -> None:
        """Go back to the last step that all ranks have finished, with the remaining ranks."""
        begun = time.perf_counter()
        logger.info("a rank was lost: %s", error)
        if self.stopped:  # other ranks may not know: all agree again after the next step
            self._stopping.keep(self.stopped)
            self.stopped = ""
        while not _survives(self._enter_without_the_lost, lambda another_loss: None):
            pass
        self._counters.recoveries += 1
        self._counters.recovery_seconds += time.perf_counter() - begun

    def _enter_without_the_lost(self) -> None:
        self._check_size(shrink_group(timeout=self._patience))
        is_cut_off = self._is_save_cut_off()
        self._enter("lost")
        if is_cut_off:
            self._saving = self.steps
        if self._checkpoint is not None and any(agree(lambda: self._saving == self.steps)):
            self._save_due(self._checkpoint)

    def _is_save_cut_off(self) -> bool:
        """Wait for a save; True if it failed, which the next would raise. Collective."""
        try:
            if self._checkpoint is not None:
                self._checkpoint.wait()
        except CheckpointError as error:
            logger.info("saving again: %s", error)
            return True
        return False

    def _save_due(self, checkpoint: Checkpoints) -> None:
        """Save a checkpoint; a loss of ranks before the end makes all ranks save again."""
        self._saving = self.steps
        checkpoint.save(self.steps, self.state)
        self._saving = -1

    def _check_size(self, group: ProcessGroup) -> None:
        if group.size() < self._least:
            raise DistBackendError(
                f"{group.size()} of the ranks are left, and at least {self._least} are asked for "
                f"(min_ranks, or tilework run --elastic)"
            )

    def _grow(self) -> None:
        before = get_default_group()
        if grow_group() is not before:
            self._enter("joined")

    def _note(self, kind: str, group: ProcessGroup, seconds: float) -> None:
        seats = current_world().seats or tuple(range(group.size()))
        event = Event(time.time(), kind, seats, self.steps, seconds)
        self.events.append(event)
        if group.rank() == 0 and kind != "started":
            told = "stopped" if kind == "stopped" else "resumed"
            facts = {"seats": seats, "steps": self.steps, "seconds": seconds}
            note_event(get_default_store(), told, reason=self.stopped, **facts)

    # -- the end -----------------------------------------------------------------------------

    def _warning(self) -> str:
        """The line for stderr if SIGTERM comes now: a kill before the first step saves nothing."""
        if self._checkpoint is None or self.steps > self._begun:
            return ""
        return (
            f"tilework: SIGTERM before the first step of this loop is finished: no step is there "
            f"to save yet (steps: {self.steps}). The loop ends with a checkpoint after that step, "
            f"if it gets the time: tilework run --grace SECONDS\n"
        )

    def _stop(self, reason: str) -> None:
        """Save a last checkpoint, and end the loop. Collective."""
        begun = time.perf_counter()
        self.stopped = reason
        if self._guarded(self._save_last):
            self._note("stopped", get_default_group(), time.perf_counter() - begun)

    def _save_last(self) -> None:
        if self._checkpoint is not None:
            if not self._checkpoint.should_save(self.steps):  # else the step has saved it
                self._checkpoint.save(self.steps, self.state)
            self._checkpoint.wait()


def _survives(act: Callable[[], object], on_loss: Callable[[Exception], object]) -> bool:
    """True if ``act()`` returns; False if it raises the loss of a rank (:func:`_is_loss`)."""
    try:
        act()
    except Exception as error:
        if not _is_loss(error):
            raise
        on_loss(error)
        return False
    return True


def _is_loss(error: BaseException | None) -> bool:
    """True if the remaining ranks can recover from an error, or from the cause, without a rank."""
    while error is not None:
        if isinstance(error, PeerLostError | CollectiveTimeoutError):
            return True
        error = error.__cause__  # the context is often an earlier loss
    return False
