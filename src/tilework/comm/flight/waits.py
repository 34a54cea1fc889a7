"""The graph of ranks that wait for each other, and the cycles in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilework.comm.flight.history import Group, History, failed, stuck
from tilework.comm.flight.ring import ANY_PEER, RUNNING, Entry


@dataclass(frozen=True)
class Wait:
    """A rank that waits in an operation, or gave up waiting, and those that it waits for."""

    rank: int
    group: Group
    entry: Entry
    awaited: tuple[int, ...]

    @property
    def place(self) -> str:
        """For a person: the operation."""
        number = f", operation #{self.entry.number}" if self.entry.number else ""
        return f"group {self.group.name!r}{number}"


def waits(history: History) -> list[Wait]:
    """Every wait: each rank's first in each group, and each message that has not arrived."""
    return [
        wait
        for group in history.groups
        for wait in (*_collective_waits(group), *_message_waits(group))
    ]


def _collective_waits(group: Group) -> Iterator[Wait]:
    for rank, calls in group.calls.items():
        # The others of a rank that runs several are queued behind the first.
        first = min((n for n, entry in calls.items() if stuck(entry)), default=None)
        if first is not None:
            others = tuple(r for r in group.absent(first) if r != rank)
            yield Wait(rank, group, calls[first], others)


def _message_waits(group: Group) -> Iterator[Wait]:
    for rank, messages in group.messages.items():
        for entry in messages:
            if not stuck(entry) or entry.peer is None:
                continue
            if entry.peer == ANY_PEER:
                others = tuple(r for r in group.ranks if r != rank)
            else:
                others = () if _has_counterpart(group, rank, entry) else (entry.peer,)
            yield Wait(rank, group, entry, others)


def _has_counterpart(group: Group, rank: int, entry: Entry) -> bool:
    """True if the peer is at the other end of this message just now."""
    wanted = "recv" if is_send(entry) else "send"
    return any(
        other.what.startswith(wanted)
        and other.outcome == RUNNING
        and other.tag == entry.tag
        and other.peer in (rank, ANY_PEER)
        for other in group.messages.get(entry.peer if entry.peer is not None else -1, ())
    )


def is_send(entry: Entry) -> bool:
    """True if a message is a send; else a receive."""
    return entry.what.startswith("send")


def blocking(history: History, all_waits: list[Wait]) -> dict[int, list[Wait]]:
    """For each rank that cannot go on, the waits that hold it up.

    A rank with asynchronous operations in flight may be computing meanwhile: where its stack is
    tells which of them, if any, it waits for.
    """
    by_rank: dict[int, list[Wait]] = {}
    for rank, record in history.records.items():
        own = [wait for wait in all_waits if wait.rank == rank]
        timed_out = [w for w in own if failed(w.entry) and "TimeoutError" in w.entry.outcome]
        running = [wait for wait in own if wait.entry.outcome == RUNNING]
        stack = record.stacks[0] if record.stacks else None
        if stack is not None and not stack.inside:
            running = []
        elif stack is not None:
            running = [wait for wait in running if wait.entry.site in stack.frames] or running
        if running or timed_out:
            by_rank[rank] = running or timed_out
    return by_rank


def circles(held_up: dict[int, list[Wait]]) -> list[list[Wait]]:
    """Cycles of ranks that wait for each other: each wait, and then that of the awaited rank."""
    cycles: dict[frozenset[int], list[Wait]] = {}
    for start in held_up:
        circle = _circle_from(start, held_up)
        if circle:
            cycles.setdefault(frozenset(wait.rank for wait in circle), circle)
    return list(cycles.values())


def _circle_from(start: int, held_up: dict[int, list[Wait]]) -> list[Wait]:
    """The shortest way from ``start`` back to it; breadth first, so long chains do not recurse."""
    paths: dict[int, list[Wait]] = {start: []}
    queue = [start]
    for rank in queue:
        for wait in held_up.get(rank, ()):
            # From whichever rank a message may come: one that is held up holds up nobody.
            if wait.entry.peer == ANY_PEER and len(wait.awaited) > 1:
                continue
            for other in wait.awaited:
                if other == start:
                    return [*paths[rank], wait]
                if other not in paths:
                    paths[other] = [*paths[rank], wait]
                    queue.append(other)
    return []
