"""Cycles of ranks that wait for each other in different groups: found, and ended with errors.

If ranks call collectives of one group in different orders, the headers show the mismatch. If rank 0
waits in one group for rank 1, and rank 1 in another group for rank 0, no header arrives. So a
thread that waits long asks the rank's groups which ranks wait for this rank in an operation that it
has not called. If there are such ranks, or if the thread waits for a message (whose sender cannot
see the wait), the thread publishes its wait in the job's store, reads the waits of the awaited
ranks, and looks for a cycle (:class:`CycleSearch`). A proven cycle is reported to all ranks in it,
and to the ranks that they hold up. Each of these aborts the group that it waits in, and the groups
in which others wait for it.

The store may be slow, or the server stopped. So a separate thread asks the store, and lives for as
long as it is needed.

A rank publishes a :class:`WaitRecord` again and again: the operation that it waits in, and the
ranks that it *holds up*, because they wait in an operation that it has not called. An edge of the
graph needs both ends: one rank waits for another in an operation, and the other rank says that it
has not called the operation, and waits itself. Nobody sees who waits for a message; there the other
end is that the rank has no fitting message under way. A rank that is stopped, or that waits no
more, is in no cycle, because no other rank can speak for it.

Ranks read records at different moments. The proof of a cycle is a moment at which all edges
existed: each wait was seen before that moment, and each record describes a time after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import NamedTuple

from tilework.comm import provenance_digest
from tilework.comm.contract import ProcessGroup
from tilework.comm.flight.dump import note_fault
from tilework.comm.flight.ring import Entry
from tilework.comm.per_call.callbacks import callbacks_due
from tilework.comm.per_call.callsite import in_library, stacks_of_threads
from tilework.comm.waits.by_rank import (
    collective_wait,
    look_while_waiting,
    open_groups,
    operation_name,
)
from tilework.comm.world import World
from tilework.errors import DistError
from tilework.store import PrefixStore, Store
from tilework.wait_graph import IN_A_CIRCLE, cycle_through

#: The folder of the standard library.
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
#: Parts of it that run callbacks later.
_CALLS_LATER = ("asyncio", "sched.py", "multiprocessing")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")
#: Packages whose threads only show or record something.
_SHOWING = ("tqdm", "tensorboard", "tensorboardX", "torch", "wandb", "execnet", "xdist")


def may_call(bystanders: Collection[threading.Thread]) -> bool:
    """True if a thread besides this one, and those known to belong to other ranks, may yet call an
    operation for this rank.

    Threads that run the program's code, or are about to, count: their next calls are unknown.
    Threads of the library, of the interpreter's own modules, and of packages that show progress do
    not count.
    """
    known = {thread.ident for thread in bystanders} | {threading.get_ident()}
    if any(isinstance(t, threading.Timer) and t.ident not in known for t in threading.enumerate()):
        return True
    return any(
        ident not in known and not _is_harmless(stack)
        for ident, stack in stacks_of_threads().items()
    )


def _is_harmless(stack: Sequence[FrameType]) -> bool:
    files = [frame.f_code.co_filename for frame in stack]
    if not all(map(_is_known, files)):
        return False
    return any(map(in_library.__getitem__, files)) or not any(map(_calls_later, files))


def _is_known(file: str) -> bool:
    if in_library[file]:
        return True
    package = _PACKAGES.match(file)
    return package[1] in _SHOWING if package else file.startswith(_STDLIB)


def _calls_later(file: str) -> bool:
    inside = file.removeprefix(_STDLIB)
    return inside != file and inside.split(os.sep)[0] in _CALLS_LATER


#: Seconds between looks at a young and at an older wait, and seconds for which a wait is young.
_PERIOD, _LATER_PERIOD, _YOUNG_SECONDS = 0.1, 0.3, 5.0
#: Seconds without a look after which the asking thread ends.
_IDLE_SECONDS = 1.0
#: Seconds after which a wait for a message is published; and seconds between looks whether another
#: rank waits for a message from this rank, if no rank waits for it in a collective.
_MESSAGE_SECONDS, _ASKED_SECONDS = 0.7, 1.5
#: Seconds added to the latter for each thread of another rank in the same interpreter.
_ASKED_SECONDS_PER_BYSTANDER = 0.01
#: The most records that a rank reads in one look.
_MAX_READ = 256
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
    """A wait to publish, and to look whether it is in a cycle."""

    #: The wait to publish.
    record: WaitRecord
    #: The groups of the rank, by name.
    groups: dict[str, ProcessGroup]
    #: The search for a cycle in the published waits.
    search: CycleSearch
    #: The part of the job's store that holds the waits of all ranks.
    store: Store
    #: The context of the waiting thread, which knows the rank.
    context: Context
    #: True to publish the wait only if a rank that waits for a message has asked.
    if_asked: bool = False


class CyclicWaits:
    """A rank's object that publishes the rank's long waits, and ends those in a cycle."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._thread: threading.Thread | None = None
        self._is_free = True
        self._next = self._begun = self._asked = 0.0
        #: The key of the wait at the last look, and at the last publication.
        self._place: object = None
        self._serial_place: object = None
        #: The key of the wait that another rank has asked for.
        self._told_place: object = None
        self._what = ""
        self._serial = self._tick = 0
        #: The default group, whose store is asked.
        self._default: weakref.ref[ProcessGroup] | None = None
        self._search = CycleSearch()
        self._over = False

    def close(self) -> None:
        """Stop publishing waits, and end the thread that talks to the store."""
        with self._changed:
            self._over, self._task = True, None
            self._changed.notify_all()

    def look(self, world: World) -> None:
        """Have a long wait published if others may wait for this rank. On the waiting thread."""
        now = time.monotonic()
        if now < self._next:
            return
        young = now - self._begun < _YOUNG_SECONDS
        self._next = now + (_PERIOD if young else _LATER_PERIOD)
        groups = open_groups(world)
        wait, entry = _wait_of(groups)
        if wait is None:
            return
        if self._place != wait.place:
            self._place, self._begun, self._asked = wait.place, now, now
        wait = wait._replace(held_up=_held_up(groups))
        pause = _ASKED_SECONDS + _ASKED_SECONDS_PER_BYSTANDER * len(world.bystanders)
        may_be_asked = wait.messages is not None and now - self._asked > pause
        tells = bool(wait.held_up) or self._told_place == wait.place
        tells = tells or (wait.message is not None and now - self._begun > _MESSAGE_SECONDS)
        if not (tells or may_be_asked) or callbacks_due():
            return
        if may_call(world.bystanders):
            return
        self._submit(world, wait, entry, None if tells else now)

    def _submit(
        self, world: World, wait: WaitRecord, entry: Entry | None, asked: float | None
    ) -> None:
        """Have ``wait`` published: always, or if asked for at time ``asked``."""
        default = world.default()
        with self._changed:
            if self._default is None or self._default() is not default:
                # What was read from the store is of another default group.
                self._default, self._search = weakref.ref(default), CycleSearch()
                self._over = False
            if not self._is_free or self._over:
                return
            self._asked = self._asked if asked is None else asked
            self._tick += 1
            groups = {each.group_name: each for each in world.records}
            if self._serial_place != wait.place:
                self._serial_place = wait.place
                self._serial += 1
                self._what = operation_name(groups[wait.group], wait.number, entry)
            record = wait._replace(
                rank=default.global_ranks[default.rank()],
                serial=self._serial,
                tick=self._tick,
                what=self._what,
            )
            store = PrefixStore("waits", world.record(default).store)
            is_asked = asked is not None
            self._task = _Task(record, groups, self._search, store, copy_context(), is_asked)
            self._is_free = False
            self._start()

    def _note_asked(self, task: _Task) -> bool:
        """True if a rank that waits for a message has asked for this rank's wait."""
        asked = task.store.check([f"asked/{task.record.rank}"])
        with self._changed:
            if asked:
                self._told_place = self._serial_place
            else:
                self._tick -= 1  # not published
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
        """Run the tasks: the main function of the thread that talks to the store."""
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
                # Without a task the wait has ended, perhaps by another rank's verdict, which this
                # rank has to pass on.
                if _obey(last) if task is None else _ask(task):
                    last = None
            except (DistError, ValueError, TypeError):  # the store is gone, or holds invalid data
                self._over, last = True, None
            del task  # the task holds groups
            with self._changed:
                self._is_free = True


def _wait_of(groups: Sequence[ProcessGroup]) -> tuple[WaitRecord | None, Entry | None]:
    """The calling thread's only wait in ``groups``, if known; with the entry of its message."""
    by_group = [(group, group.messages_under_way()) for group in groups]
    is_known = all(under_way is not None for _, under_way in by_group)
    entries = [(group, entry) for group, its in by_group for entry in its or ()]
    messages = tuple(_message(*each) for each in entries) if is_known else None
    collective = collective_wait(groups)
    if collective is not None:
        group, number, ranks = collective
        awaited = tuple(group.global_ranks[rank] for rank in ranks)
        return WaitRecord(group.group_name, number, awaited, None, messages), None
    if not messages or len(messages) > 1 or messages[0].peer < 0:
        return None, None  # the thread may wait for any of several
    (message,), entry = messages, entries[0][1]
    number = int(entry.entered * 1e6)
    return WaitRecord(message.group, number, (message.peer,), message, messages), entry


def _message(group: ProcessGroup, entry: Entry) -> SeenMessage:
    peer = -1 if entry.peer is None else entry.peer
    return SeenMessage(group.group_name, entry.what.startswith("send"), peer, entry.tag)


def _held_up(groups: Sequence[ProcessGroup]) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        (group.global_ranks[rank], group.group_name, number)
        for group in groups
        for rank, number, _ in group.blocked()
    )


def _obey(task: _Task) -> bool:
    """End this rank's wait if another rank has found that it is in, or held up by, a cycle."""
    verdict = _read(task.store, f"verdict/{task.record.rank}")
    if verdict is None:
        return False
    serial, ranks, text = json.loads(verdict)
    if serial != task.record.serial:
        return False
    _abort(task, ranks, text)
    return True


def _ask(task: _Task) -> bool:
    """Publish this rank's wait; True if it was in a cycle, whose waits all end."""
    if _obey(task):
        return True
    record, store = task.record, task.store
    if record.message is not None:
        store.set(f"asked/{record.message.peer}", b"1")
    store.set(f"wait/{record.rank}", record.encode())

    def read(rank: int) -> WaitRecord | None:
        text = _read(store, f"wait/{rank}")
        return None if text is None else WaitRecord.decode(text)

    cycle = task.search.look(record, read)
    if not cycle:
        return False
    ranks = sorted(each.rank for each in cycle)
    text = describe(cycle)
    text = f"{text}\n{_ADVICE}{provenance_digest.advice(text)}"
    for each in held_up_by(cycle, read):
        store.set(f"verdict/{each.rank}", json.dumps([each.serial, ranks, text]))
    _abort(task, ranks, text)
    return True


def _abort(task: _Task, ranks: Sequence[int], text: str) -> None:
    """End this rank's wait, and other ranks' waits for it, by aborting the groups."""
    record = task.record
    for name in dict.fromkeys([*(name for _, name, _ in record.held_up), record.group]):
        task.context.run(task.groups[name].abort_for, "mismatch", ranks, text)
    # A record takes time, in which ranks that know end: others would see deaths.
    task.context.run(note_fault, text)


def _read(store: Store, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    with contextlib.suppress(DistError):  # another rank deleted it
        return store.get(key, timedelta(seconds=1))
    return None


# -- records, and the search for a cycle: pure ---------------------------------------------


class SeenMessage(NamedTuple):
    """A message, as the rank at one end sees it."""

    #: The name of the group.
    group: str
    #: True if this rank sends the message; False if this rank receives it.
    is_send: bool
    #: The global rank at the other end; -1: any.
    peer: int
    tag: int

    def fits(self, other: SeenMessage, rank: int, other_rank: int) -> bool:
        """True if the two messages may be the two ends of the same transfer."""
        return (
            (self.group, self.tag, not self.is_send) == (other.group, other.tag, other.is_send)
            and self.peer in (other_rank, -1)
            and other.peer in (rank, -1)
        )


class WaitRecord(NamedTuple):
    """A rank's wait as it is published: for whom, and which ranks the rank holds up."""

    #: The name of the group that the rank waits in.
    group: str
    #: The number of a collective in the group; the time of a message, in Unix microseconds.
    number: int
    #: Global ranks; some may have come.
    awaited: tuple[int, ...]
    #: The message of a wait for a message, as this rank sees it; None in a collective.
    message: SeenMessage | None
    #: The messages that the rank has under way, of all groups; None if unknown.
    messages: tuple[SeenMessage, ...] | None
    rank: int = -1
    #: The number of the wait; each wait of a rank has another.
    serial: int = 0
    #: Counts the rank's records. A record describes a time after the record before was published.
    tick: int = 0
    #: The ranks that it holds up: (rank, group, number) of each wait.
    held_up: tuple[tuple[int, str, int], ...] = ()
    #: The operation, for a person.
    what: str = ""

    @property
    def place(self) -> object:
        """A key that is equal for the same wait with the same messages under way."""
        return self.group, self.number, self.messages

    def holds_up(self, other: WaitRecord) -> bool:
        """True if ``other`` waits for this rank in an operation that this rank has not called."""
        if other.message is None:
            return (other.rank, other.group, other.number) in self.held_up
        return self.messages is not None and not any(
            other.message.fits(message, other.rank, self.rank) for message in self.messages
        )

    def encode(self) -> str:
        """The record as text."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: bytes) -> WaitRecord:
        """A record from the text of :meth:`encode`."""
        record = cls(*json.loads(text))
        message, messages = record.message, record.messages
        return record._replace(
            awaited=tuple(record.awaited),
            message=None if message is None else SeenMessage(*message),
            messages=None if messages is None else tuple(SeenMessage(*each) for each in messages),
            held_up=tuple((int(r), str(g), int(n)) for r, g, n in record.held_up),
        )


class CycleSearch:
    """The search for a cycle in the waits of other ranks, as this rank reads them during a wait."""

    def __init__(self) -> None:
        #: The waits of the cycle at the last look: (rank, serial).
        self._cycle: list[tuple[int, int]] = []
        #: The ticks of the records that were read first after the look that found the cycle.
        self._ticks: list[int] = []

    def look(
        self, own: WaitRecord, read: Callable[[int], WaitRecord | None]
    ) -> Sequence[WaitRecord]:
        """The shortest cycle through this rank, if it is proven; empty if there is none. ``own`` is
        of a moment after the last look; ``read`` gives the newest record of a rank.
        """
        records: dict[int, WaitRecord | None] = {own.rank: own}

        def waits_of(rank: int) -> Iterator[WaitRecord]:
            record = records[rank]
            if record is None:
                return
            for other in record.awaited:
                if other not in records and len(records) <= _MAX_READ:
                    records[other] = read(other)
            others = [records.get(other) for other in record.awaited]
            holding = (each.rank for each in others if each and each.holds_up(record))
            yield record._replace(awaited=tuple(holding))

        cycle = cycle_through(own.rank, waits_of)
        return cycle if self._is_proven(cycle) else ()

    def _is_proven(self, cycle: Sequence[WaitRecord]) -> bool:
        """True if all waits of ``cycle`` existed at one moment.

        The moment is the end of the look that found the cycle: each wait had been read, so it had
        begun. A record describes a time after the record before was published; so the second record
        after one that was read later than the moment describes a time later than the moment, and
        the third is by a rank that has asked for messages since.
        """
        waits = [(record.rank, record.serial) for record in cycle]
        ticks = [record.tick for record in cycle]
        if waits != self._cycle:
            self._cycle, self._ticks = waits, []
        elif not self._ticks:
            self._ticks = ticks
        elif cycle:
            return all(now >= then + 3 for now, then in zip(ticks, self._ticks, strict=True))
        return False


def held_up_by(
    cycle: Sequence[WaitRecord], read: Callable[[int], WaitRecord | None]
) -> Sequence[WaitRecord]:
    """The records of a cycle, and of the ranks that wait for it, if they hold up others."""
    records = {record.rank: record for record in cycle}
    queue = [*cycle]
    for record in queue:
        for rank, group, number in record.held_up:
            if rank in records or len(records) >= _MAX_READ:
                continue
            other = read(rank)
            if other is not None and (other.group, other.number) == (group, number):
                records[rank] = other
                queue.append(other)
    return queue


def describe(cycle: Sequence[WaitRecord]) -> str:
    """The cycle for a person: who waits for whom, in which operation."""
    following = [*cycle[1:], cycle[0]]
    lines = [
        f"  rank {record.rank} waits for rank {after.rank} in {record.what}"
        for record, after in zip(cycle, following, strict=True)
    ]
    more = len(lines) - 5
    shown = lines if more <= 0 else [*lines[:5], f"  and {more} more"]
    return f"ranks {IN_A_CIRCLE}, and none can continue:\n" + "\n".join(shown)
