"""The waits in the records of all ranks: who waits in which operation, and for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilework.comm.flight.history import Group, History, failed, stuck
from tilework.comm.flight.ring import ANY_PEER, RUNNING, Entry
from tilework.wait_graph import cycles

#: Words in the error of ranks that noticed the cycle themselves.
IN_A_CIRCLE = "wait for each other in a circle"


@dataclass(frozen=True)
class Wait:
    """A rank that waits in an operation, or gave up, and the ranks that it waits for.

    Attributes:
        rank: The waiting rank.
        group: The group of the operation.
        entry: The operation, as the waiting rank recorded it.
        awaited: The global ranks that it waits for.
    """

    rank: int
    group: Group
    entry: Entry
    awaited: tuple[int, ...]

    @property
    def place(self) -> str:
        """The name of the group and the number of the operation, as words."""
        number = f", operation #{self.entry.number}" if self.entry.number else ""
        return f"group {self.group.name!r}{number}"


def waits(history: History) -> list[Wait]:
    """All waits in the records.

    For each rank and group: the first collective that runs or failed, and each message that runs or
    failed.
    """
    return [
        wait
        for group in history.groups
        for wait in (*_collective_waits(group), *_message_waits(group))
    ]


def _collective_waits(group: Group) -> Iterator[Wait]:
    for rank, calls in group.calls.items():
        # A rank's further operations are queued behind the first.
        first = min((n for n, entry in calls.items() if stuck(entry)), default=None)
        if first is not None:
            yield Wait(rank, group, calls[first], group.absent(first))


def _message_waits(group: Group) -> Iterator[Wait]:
    ends = {
        (rank, is_send(entry), entry.tag, entry.peer)
        for rank, messages in group.messages.items()
        for entry in messages
        if entry.outcome == RUNNING
    }
    for rank, messages in group.messages.items():
        for entry in messages:
            if not stuck(entry) or entry.peer is None:
                continue
            if entry.peer == ANY_PEER:
                others = tuple(r for r in group.ranks if r != rank)
            else:
                end = (entry.peer, not is_send(entry), entry.tag)
                met = (*end, rank) in ends or (*end, ANY_PEER) in ends
                others = () if met else (entry.peer,)
            yield Wait(rank, group, entry, others)


def is_send(entry: Entry) -> bool:
    """True if a message is a send; False if it is a receive."""
    return entry.what.startswith("send")


def blocking(history: History, all_waits: list[Wait]) -> dict[int, list[Wait]]:
    """For each rank that cannot continue, the waits that hold it up.

    A rank with asynchronous operations in flight may be computing: the rank's stack shows which
    operation, if any, the rank waits for. A wait that was given up counts as a wait.
    """
    by_rank: dict[int, list[Wait]] = {}
    all_own: dict[int, list[Wait]] = {}
    for wait in all_waits:
        all_own.setdefault(wait.rank, []).append(wait)
    for rank, record in history.records.items():
        own = all_own.get(rank, [])
        given_up = [wait for wait in own if _gave_up(wait.entry)]
        running = [wait for wait in own if wait.entry.outcome == RUNNING]
        stack = record.stacks[0] if record.stacks else None
        if stack is not None and not stack.inside:
            running = []
        elif stack is not None:
            running = [wait for wait in running if wait.entry.site in stack.frames] or running
        if running or given_up:
            by_rank[rank] = running or given_up
    return by_rank


def _gave_up(entry: Entry) -> bool:
    why = "TimeoutError", IN_A_CIRCLE
    return failed(entry) and any(words in entry.outcome for words in why)


def circles(held_up: Mapping[int, Sequence[Wait]]) -> list[list[Wait]]:
    """Cycles of ranks that wait for each other: see :func:`tilework.wait_graph.cycles`.

    A message may come from several ranks, so no single rank of them holds up the receiver.
    """
    return cycles(
        wait
        for waits_of_rank in held_up.values()
        for wait in waits_of_rank
        if wait.entry.peer != ANY_PEER or len(wait.awaited) == 1
    )
