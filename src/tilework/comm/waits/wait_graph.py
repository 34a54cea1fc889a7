"""Cycles of ranks that wait for each other in different groups, found by each of them.

A rank that waits publishes a :class:`WaitRecord`, again and again: the operation that it waits in,
and the ranks that it *holds up*, since they wait in an operation that it has not called. An edge of
the graph needs both ends: one rank waits for another in an operation, and that other says that it
has not called it, and waits itself. Nobody sees who waits for a message; there the other end is
that the rank has no message under way that would fit. So a rank that is stopped, or that has gone
on since, is in no cycle: nobody else can speak for it.

Records are read at different moments. The proof that a cycle exists is a moment at which all of its
edges did: each wait had been seen to be there before it, and each record tells of a time after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.comm.flight.deadlocks import IN_A_CIRCLE

#: The most records that a rank reads in one look.
_MAX_READ = 256
#: The most ticks that are remembered of a rank.
_MAX_TICKS = 8


class Message(NamedTuple):
    """A message, as the rank at one end has it."""

    group: str
    is_send: bool
    #: The global rank at the other end; -1: any.
    peer: int
    tag: int

    def fits(self, other: Message, rank: int, other_rank: int) -> bool:
        """True if it is one message with another rank's, which may therefore arrive."""
        return (
            (self.group, self.tag, not self.is_send) == (other.group, other.tag, other.is_send)
            and self.peer in (other_rank, -1)
            and other.peer in (rank, -1)
        )


@dataclass(frozen=True)
class WaitRecord:
    """A rank's wait, as it was while it asked itself."""

    rank: int
    #: Of the wait: the rank's next one has another.
    serial: int
    #: Counts the rank's records. What one tells was so after the one before had been published.
    tick: int
    group: str
    #: The operation's number in the group.
    number: int
    #: Global ranks; some may have come.
    awaited: tuple[int, ...]
    #: The ranks that it holds up: (rank, group, number) of their waits.
    held_up: tuple[tuple[int, str, int], ...]
    #: The operation, for a person.
    what: str
    #: Of a wait for a message: it, as this rank has it.
    message: Message | None = None
    #: The messages that it has under way, of all groups; None if that is not known.
    messages: tuple[Message, ...] | None = None

    def holds_up(self, other: WaitRecord) -> bool:
        """True if ``other`` is a wait for this rank, which has not called what it is waited in."""
        if other.message is None:
            return (other.rank, other.group, other.number) in self.held_up
        return self.messages is not None and not any(
            other.message.fits(message, other.rank, self.rank) for message in self.messages
        )

    def encode(self) -> str:
        """The record as text."""
        values = [self.rank, self.serial, self.tick, self.group, self.number]
        messages = [self.message, self.messages]
        return json.dumps([*values, self.awaited, self.held_up, self.what, *messages])

    @classmethod
    def decode(cls, text: bytes) -> WaitRecord:
        """A record from its text."""
        rank, serial, tick, group, number, *rest = json.loads(text)
        awaited, held_up, what, message, messages = rest
        held = tuple((int(r), str(g), int(n)) for r, g, n in held_up)
        return cls(
            rank,
            serial,
            tick,
            group,
            number,
            tuple(awaited),
            held,
            what,
            None if message is None else Message(*message),
            None if messages is None else tuple(Message(*each) for each in messages),
        )


@dataclass
class _Seen:
    """The knowledge of a rank's present wait."""

    serial: int
    #: The first look that saw it.
    since: int
    #: By tick: the last look that saw it.
    looks: dict[int, int] = field(default_factory=dict)

    def see(self, look: int, tick: int) -> None:
        self.looks.pop(tick, None)
        self.looks[tick] = look
        if len(self.looks) > _MAX_TICKS:
            del self.looks[next(iter(self.looks))]

    def until(self) -> int:
        """The last look at whose end the wait was still there; -1 if that is unknown.

        The newest record tells of a time after the one before it had been published. So the reading
        of a still older one came before that time, and the end of the look before came earlier yet.
        """
        newest = max(self.looks)
        return max(
            (look - 1 for tick, look in self.looks.items() if tick <= newest - 2), default=-1
        )


class WaitGraph:
    """The waits of other ranks, as this one reads them while it waits itself."""

    def __init__(self) -> None:
        self._look = 0
        self._seen: dict[int, _Seen] = {}

    def look(
        self, own: WaitRecord, read: Callable[[int], WaitRecord | None]
    ) -> Sequence[WaitRecord]:
        """The shortest cycle through this rank that is proven; empty if there is none.

        Args:
            own: This rank's record, of a moment after the last look.
            read: The newest record of a rank; None if it has published none.
        """
        self._look += 1
        self._note(own)
        records: dict[int, WaitRecord | None] = {}
        before: dict[int, WaitRecord] = {}
        queue = [own]
        for record in queue:
            for rank in record.awaited:
                if rank == own.rank and own.holds_up(record):
                    cycle = _way(own, record, before)
                    return cycle if self._is_proven(cycle) else ()
                if rank not in records and len(records) < _MAX_READ:
                    records[rank] = self._note(read(rank))
                other = records.get(rank)
                if other is None or rank == own.rank or rank in before:
                    continue
                if other.holds_up(record):
                    before[rank] = record
                    queue.append(other)
        return ()

    def _note(self, record: WaitRecord | None) -> WaitRecord | None:
        if record is not None:
            seen = self._seen.get(record.rank)
            if seen is None or seen.serial != record.serial:
                seen = self._seen[record.rank] = _Seen(record.serial, self._look)
            seen.see(self._look, record.tick)
        return record

    def _is_proven(self, cycle: Sequence[WaitRecord]) -> bool:
        """True if all waits were there at one moment: after the look that saw the last of them."""
        seen = [self._seen[record.rank] for record in cycle]
        moment = max(each.since for each in seen)
        # This rank's own record is of a moment after the last look; see look().
        return moment < self._look and all(each.until() >= moment for each in seen[1:])


def _way(own: WaitRecord, last: WaitRecord, before: dict[int, WaitRecord]) -> Sequence[WaitRecord]:
    way = [last]
    while way[-1] is not own:
        way.append(before[way[-1].rank])
    return way[::-1]


def held_up_by(
    cycle: Sequence[WaitRecord], read: Callable[[int], WaitRecord | None]
) -> Sequence[WaitRecord]:
    """The records of a cycle, and of ranks that wait for one of them, or for another of these.

    Only ranks that hold up others themselves have records.
    """
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
    """The cycle for a person: who waits for whom, in what."""
    following = [*cycle[1:], cycle[0]]
    lines = [
        f"  rank {record.rank} waits for rank {after.rank} in {record.what}"
        for record, after in zip(cycle, following, strict=True)
    ]
    more = len(lines) - 5
    shown = lines if more <= 0 else [*lines[:5], f"  and {more} more"]
    return f"ranks {IN_A_CIRCLE}, and none can go on:\n" + "\n".join(shown)
