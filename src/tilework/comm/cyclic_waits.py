"""Ranks that wait for each other in different groups: noticed, and ended with an error on each.

Collectives of one group in another order on another rank are a mismatch, which headers tell. Where
rank 0 waits in one group for rank 1, and rank 1 in another group for rank 0, no header arrives.
So a thread that waits long asks its groups who waits for this rank in an operation that it has not
called. Only where somebody does, it publishes its wait in the job's store, reads those of the ranks
that it waits for, and looks for a cycle (:mod:`.wait_graph`). A proven one is told to all of its
ranks, and to those that it holds up. Each aborts the group that it waits in, and those in which
others wait for it.

The store may be slow to answer, or its server stopped: so the asking is done on a thread of its
own, which lives for as long as it is needed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from datetime import timedelta

from tilework.comm import long_waits, own_threads, provenance
from tilework.comm.callbacks import callbacks_due
from tilework.comm.callsite import call_site
from tilework.comm.contract import ProcessGroup
from tilework.comm.flight.ring import RUNNING
from tilework.comm.wait_graph import WaitGraph, WaitRecord, describe, held_up_by
from tilework.comm.world import World, current_world
from tilework.errors import DistError
from tilework.store import PrefixStore, Store

#: Seconds between looks; and after the first of a wait, when it is no longer a young one.
_PERIOD, _LATER_PERIOD, _YOUNG_SECONDS = 0.1, 0.3, 5.0
#: Seconds without a look after which the asking thread ends.
_IDLE_SECONDS = 1.0
_ADVICE = (
    "Call the operations of all groups in one order on every rank: where two groups share ranks, "
    "the order between them counts, too."
)


def notice_cycles() -> None:
    """Have threads that wait long look for cycles, from now on."""
    long_waits.add_function(_look)


def _look() -> None:
    """Look whether the wait of the calling thread is one of a cycle. Quick; to be called often."""
    world = current_world()
    if world.default_group is not None:
        world.state(CyclicWaits).look(world)


@dataclass(frozen=True)
class _Task:
    """The next task of the asking thread."""

    record: WaitRecord
    #: The rank's groups, by name.
    groups: dict[str, ProcessGroup]
    graph: WaitGraph
    store: Store
    #: Of the thread that waits: it tells the rank.
    context: Context


class CyclicWaits:
    """A rank's waits, as it tells the others of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._thread: threading.Thread | None = None
        self._is_free = True
        self._next = 0.0
        self._place, self._begun, self._what = ("", 0), 0.0, ""
        self._serial = self._tick = 0
        #: Of the default group whose store is asked.
        self._default: weakref.ref[ProcessGroup] | None = None
        self._graph = WaitGraph()
        self._over = False

    def close(self) -> None:
        """Ask no more."""
        with self._changed:
            self._over, self._task = True, None
            self._changed.notify_all()

    def _follow(self, default: ProcessGroup) -> None:
        """Begin anew if the default group is another one, which has another store."""
        if self._default is None or self._default() is not default:
            self._default, self._graph, self._over = weakref.ref(default), WaitGraph(), False

    def look(self, world: World) -> None:
        """On the thread that waits: collect what is to be told, if anybody waits for this rank."""
        now = time.monotonic()
        if now < self._next:
            return
        young = now - self._begun < _YOUNG_SECONDS
        self._next = now + (_PERIOD if young else _LATER_PERIOD)
        groups = [*world.records]
        found = next(((g, wait) for g in groups if (wait := g.waiting())), None)
        if found is None:
            return
        held_up = _held_up(groups)
        if not held_up or callbacks_due() or own_threads.may_call(world.bystanders):
            return
        group, (number, awaited) = found
        default = world.default()
        with self._changed:
            self._follow(default)
            if not self._is_free or self._over:
                return
            self._tick += 1
            if self._place != (group.group_name, number):
                self._place, self._begun = (group.group_name, number), now
                self._serial += 1
                self._what = operation_name(group, number)
            record = WaitRecord(
                default.rank(),
                self._serial,
                self._tick,
                group.group_name,
                number,
                tuple(group.global_ranks[rank] for rank in awaited),
                held_up,
                self._what,
            )
            by_name = {each.group_name: each for each in groups}
            store = PrefixStore("waits", world.record(default).store)
            self._task = _Task(record, by_name, self._graph, store, copy_context())
            self._is_free = False
            self._start()

    def _start(self) -> None:
        if self._thread is not None:
            self._changed.notify_all()
            return
        self._thread = threading.Thread(
            target=self._serve, name="tilework cyclic waits", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        """The asking thread."""
        last: _Task | None = None
        idle_at = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._task or self._over, _PERIOD)
                task, self._task = self._task, None
                if task is None and (self._over or last is None or time.monotonic() > idle_at):
                    self._thread, self._is_free = None, True
                    return
            if task is not None:
                last, idle_at = task, time.monotonic() + _IDLE_SECONDS
            assert last is not None
            try:
                # Without a task the wait has ended: perhaps by another rank's verdict, which this
                # rank has to pass on.
                if _obey(last) if task is None else _ask(task):
                    last = None
            except (DistError, ValueError):  # the store has gone, or holds what nobody wrote
                self._over, last = True, None
            del task  # which holds groups
            with self._changed:
                self._is_free = True


def _held_up(groups: Sequence[ProcessGroup]) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        (group.global_ranks[rank], group.group_name, number)
        for group in groups
        for rank, number, _ in group.blocked()
    )


def operation_name(group: ProcessGroup, number: int) -> str:
    """The operation that the calling thread waits in, for a person."""
    running = [e for e in group.flight_entries() if e.outcome == RUNNING and e.peer is None]
    entry = next((e for e in running if e.number == number), running[-1] if running else None)
    title = provenance.named(entry.what if entry else f"operation #{number}")
    site = call_site() or (entry.site if entry else "")
    place = f" at {site}" if site else ""
    return f"{title}{place} (group {group.group_name!r})"


def _obey(task: _Task) -> bool:
    """End this rank's wait, and those that it causes, if another rank has found it in a cycle.

    Returns:
        True if one has.
    """
    verdict = _read(task.store, f"verdict/{task.record.rank}")
    if verdict is None:
        return False
    serial, ranks, text = json.loads(verdict)
    if serial != task.record.serial:
        return False
    _abort(task, ranks, text)
    return True


def _ask(task: _Task) -> bool:
    """Publish this rank's wait, and end it if it is one of a cycle.

    Returns:
        True if it was.
    """
    if _obey(task):
        return True
    record, store = task.record, task.store
    store.set(f"wait/{record.rank}", record.encode())

    def read(rank: int) -> WaitRecord | None:
        text = _read(store, f"wait/{rank}")
        return None if text is None else WaitRecord.decode(text)

    cycle = task.graph.look(record, read)
    if not cycle:
        return False
    ranks = sorted(each.rank for each in cycle)
    text = describe(cycle)
    text = f"{text}\n{_ADVICE}{provenance.advice(text)}"
    for each in held_up_by(cycle, read):
        store.set(f"verdict/{each.rank}", json.dumps([each.serial, ranks, text]))
    _abort(task, ranks, text)
    return True


def _abort(task: _Task, ranks: Sequence[int], text: str) -> None:
    """End this rank's wait, and those of the ranks that it holds up."""
    record = task.record
    for name in dict.fromkeys([*(name for _, name, _ in record.held_up), record.group]):
        task.context.run(task.groups[name].abort_for, "mismatch", ranks, text)


def _read(store: Store, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    with contextlib.suppress(DistError):  # deleted meanwhile
        return store.get(key, timedelta(seconds=1))
    return None
