"""Ranks that wait for each other in different groups: noticed, and ended with an error on each.

Collectives of one group in another order on another rank are a mismatch, which headers tell. Where
rank 0 waits in one group for rank 1, and rank 1 in another group for rank 0, no header arrives.
So a thread that waits long asks its groups who waits for this rank in an operation that it has not
called. Only where somebody does, or it waits for a message, whose sender cannot see that, it
publishes its wait in the job's store, reads those of the ranks that it waits for, and looks for a
cycle (:mod:`.wait_graph`). A proven one is told to all of its ranks, and to those that it holds up.
Each aborts the group that it waits in, and those in which others wait for it.

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

from tilework.comm import provenance
from tilework.comm.callbacks import callbacks_due
from tilework.comm.callsite import call_site
from tilework.comm.contract import ProcessGroup
from tilework.comm.flight.ring import RUNNING, Entry
from tilework.comm.waits import own_threads
from tilework.comm.waits.by_rank import collective_wait, look_while_waiting
from tilework.comm.waits.wait_graph import Message, WaitGraph, WaitRecord, describe, held_up_by
from tilework.comm.world import World
from tilework.errors import DistError
from tilework.store import PrefixStore, Store

#: Seconds between looks; and after the first of a wait, when it is no longer a young one.
_PERIOD, _LATER_PERIOD, _YOUNG_SECONDS = 0.1, 0.3, 5.0
#: Seconds without a look after which the asking thread ends.
_IDLE_SECONDS = 1.0
#: Seconds of a wait for a message after which it is told; and between looks of a rank that nobody
#: waits for in a collective whether somebody waits for a message.
_MESSAGE_SECONDS, _ASKED_SECONDS = 0.7, 1.5
#: Added to the latter for each thread of another rank: they share an interpreter.
_ASKED_SECONDS_PER_BYSTANDER = 0.01
_ADVICE = (
    "Call the operations of all groups in one order on every rank: where two groups share ranks, "
    "the order between them counts, too. Where messages cross, let one rank receive before it "
    "sends, or post them together with batch_isend_irecv()."
)


def notice_cycles() -> None:
    """Have threads that wait long look for cycles, from now on."""
    look_while_waiting(CyclicWaits)


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
    #: True if it is to be told only if a rank that waits for a message has asked.
    if_asked: bool = False


@dataclass(frozen=True)
class _Wait:
    """The wait of the calling thread."""

    group: ProcessGroup
    #: That of a collective; of a message its time.
    number: int
    #: Global ranks.
    awaited: tuple[int, ...]
    message: Message | None
    messages: tuple[Message, ...] | None
    #: Of a message: its name and place in the program.
    entry: Entry | None = None

    @property
    def place(self) -> object:
        """Something that is equal for the same wait, with the same messages under way."""
        return self.group.group_name, self.number, self.messages


class CyclicWaits:
    """A rank's waits, as it tells the others of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._thread: threading.Thread | None = None
        self._is_free = True
        self._next = self._begun = self._asked = 0.0
        #: The wait as it was last looked at, and as it was last told.
        self._place: object = None
        self._serial_place: object = None
        #: That of which somebody has asked.
        self._told_place: object = None
        self._what = ""
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
        wait = _wait_of(groups)
        if wait is None:
            return
        if self._place != wait.place:
            self._place, self._begun, self._asked = wait.place, now, now
        held_up = _held_up(groups)
        pause = _ASKED_SECONDS + _ASKED_SECONDS_PER_BYSTANDER * len(world.bystanders)
        may_be_asked = wait.messages is not None and now - self._asked > pause
        tells = bool(held_up) or self._told_place == wait.place
        tells = tells or (wait.message is not None and now - self._begun > _MESSAGE_SECONDS)
        if not (tells or may_be_asked) or callbacks_due():
            return
        if own_threads.may_call(world.bystanders):
            return
        self._submit(world, groups, wait, held_up, None if tells else now)

    def _submit(
        self,
        world: World,
        groups: Sequence[ProcessGroup],
        wait: _Wait,
        held_up: tuple[tuple[int, str, int], ...],
        asked: float | None,
    ) -> None:
        """Give the asking thread a task. ``asked``: the time, if somebody has to ask for it."""
        default = world.default()
        with self._changed:
            self._follow(default)
            if not self._is_free or self._over:
                return
            self._asked = self._asked if asked is None else asked
            self._tick += 1
            if self._serial_place != wait.place:
                self._serial_place = wait.place
                self._serial += 1
                self._what = operation_name(wait.group, wait.number, wait.entry)
            record = WaitRecord(
                default.rank(),
                self._serial,
                self._tick,
                wait.group.group_name,
                wait.number,
                wait.awaited,
                held_up,
                self._what,
                wait.message,
                wait.messages,
            )
            by_name = {each.group_name: each for each in groups}
            store = PrefixStore("waits", world.record(default).store)
            is_asked = asked is not None
            self._task = _Task(record, by_name, self._graph, store, copy_context(), is_asked)
            self._is_free = False
            self._start()

    def _note_asked(self, task: _Task) -> bool:
        """True if a rank that waits for a message has asked for this one's wait."""
        asked = task.store.check([f"asked/{task.record.rank}"])
        with self._changed:
            if asked:
                self._told_place = self._serial_place
            else:
                self._tick -= 1  # it is not told
        return asked

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
                if task is not None and task.if_asked and not self._note_asked(task):
                    task = None
                # Without a task the wait has ended: perhaps by another rank's verdict, which this
                # rank has to pass on.
                if _obey(last) if task is None else _ask(task):
                    last = None
            except (DistError, ValueError):  # the store has gone, or holds what nobody wrote
                self._over, last = True, None
            del task  # which holds groups
            with self._changed:
                self._is_free = True


def _wait_of(groups: Sequence[ProcessGroup]) -> _Wait | None:
    """The wait of the calling thread; None if it is not known."""
    by_group = [(group, group.messages_under_way()) for group in groups]
    is_known = all(under_way is not None for _, under_way in by_group)
    entries = [(group, entry) for group, its in by_group for entry in its or ()]
    messages = tuple(_message(*each) for each in entries) if is_known else None
    collective = collective_wait(groups)
    if collective is not None:
        group, number, ranks = collective
        awaited = tuple(group.global_ranks[rank] for rank in ranks)
        return _Wait(group, number, awaited, None, messages)
    if not messages or len(messages) > 1 or messages[0].peer < 0:
        return None  # it may be any of several that the thread waits for
    group, entry = entries[0]
    number = int(entry.entered * 1e6)
    return _Wait(group, number, (messages[0].peer,), messages[0], messages, entry)


def _message(group: ProcessGroup, entry: Entry) -> Message:
    peer = -1 if entry.peer is None else entry.peer
    return Message(group.group_name, entry.what.startswith("send"), peer, entry.tag)


def _held_up(groups: Sequence[ProcessGroup]) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        (group.global_ranks[rank], group.group_name, number)
        for group in groups
        for rank, number, _ in group.blocked()
    )


def operation_name(group: ProcessGroup, number: int, entry: Entry | None = None) -> str:
    """The operation that the calling thread waits in, for a person; ``entry``: if it is known."""
    if entry is None:
        running = [e for e in group.flight_entries() if e.outcome == RUNNING and e.peer is None]
        last = running[-1] if running else None
        entry = next((e for e in running if e.number == number), last)
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
    if record.message is not None:
        store.set(f"asked/{record.message.peer}", b"1")
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
