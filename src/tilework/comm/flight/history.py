"""The records of all ranks side by side: groups, operations by number, the place of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.comm.flight.document import GroupLog, Record
from tilework.comm.flight.ring import ANY_PEER, FAILED, RUNNING, Entry
from tilework.show import run_texts
from tilework.wait_graph import IN_A_CIRCLE, cycles

#: Names of functions that are the same operation. (The table of collectives needs torch, which
#: the launcher does not load.)
ALIASES = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
}
#: Operations whose arguments must all be equal on all ranks.
ELEMENTWISE = ("broadcast", "all_reduce", "scan", "exscan")


@dataclass
class Group:
    """A group, as the ranks' records describe it."""

    name: str
    backend: str
    #: Global ranks, in the order of group ranks.
    ranks: tuple[int, ...]
    #: Each rank's collectives, by number.
    calls: dict[int, dict[int, Entry]] = field(default_factory=dict)
    #: Each rank's messages, oldest first.
    messages: dict[int, list[Entry]] = field(default_factory=dict)
    _lasts: dict[int, Entry] = field(default_factory=dict)
    _by_number: dict[int, dict[int, Entry]] = field(default_factory=dict)
    _absent: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, rank: int, log: GroupLog) -> None:
        """Add the operations that one rank recorded in this group."""
        self.calls[rank] = {entry.number: entry for entry in log.entries if entry.number}
        self.messages[rank] = [entry for entry in log.entries if not entry.number]
        for number, entry in self.calls[rank].items():
            self._by_number.setdefault(number, {})[rank] = entry
        if self.calls[rank]:
            self._lasts[rank] = self.calls[rank][max(self.calls[rank])]

    def last(self, rank: int) -> Entry | None:
        """The collective that a rank entered last; None if unknown, or if it entered none."""
        return self._lasts.get(rank)

    def at(self, number: int) -> dict[int, Entry]:
        """The calls of collective ``number`` of the group, by global rank."""
        return self._by_number.get(number, {})

    def absent(self, number: int) -> tuple[int, ...]:
        """The ranks that have not entered collective ``number``, or have no record. Cached."""
        if number not in self._absent:
            lasts = ((rank, self._lasts.get(rank)) for rank in self.ranks)
            self._absent[number] = tuple(
                rank for rank, last in lasts if last is None or last.number < number
            )
        return self._absent[number]

    def first_stuck(self) -> int | None:
        """The number of the first collective that runs or failed on some rank, or None."""
        numbers = (e.number for calls in self.calls.values() for e in calls.values() if stuck(e))
        return min(numbers, default=None)

    def first_divergence(self) -> int | None:
        """The number of the first collective that ranks called differently, or None."""
        for number in sorted(self._by_number):
            entries = self.at(number).values()
            differ = len({family(entry) for entry in entries}) > 1
            # Backends that compare arguments report this; in the others ranks wait for ever.
            if differ or (any(map(stuck, entries)) and len(set(map(_compared, entries))) > 1):
                return number
            if any("CollectiveMismatchError" in e.outcome for e in entries if failed(e)):
                return number
        return None


def stuck(entry: Entry) -> bool:
    """True if an operation runs, or has failed."""
    return entry.outcome == RUNNING or failed(entry)


def failed(entry: Entry) -> bool:
    """True if an operation has failed."""
    return entry.outcome.startswith(FAILED)


def family(entry: Entry) -> str:
    """The name of an operation without variants: ``all_gather_into_tensor`` is ``all_gather``."""
    name = entry.what.partition(" ")[0]
    return ALIASES.get(name, name)


def _compared(entry: Entry) -> str:
    return entry.what.partition(" ")[2] if family(entry) in ELEMENTWISE else ""


class History:
    """All ranks' records."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.records = dict(sorted(records.items()))
        self.groups: list[Group] = _groups(self.records)
        size = max((record.world_size for record in records.values()), default=0)
        #: Ranks whose records are missing.
        self.unheard = [rank for rank in range(size) if rank not in records]
        #: Ranks that others saw die or leave.
        self.lost = {
            rank
            for record in records.values()
            for fault in record.faults
            if fault.text.startswith("PeerLostError")
            for rank in fault.ranks
        }


def _groups(records: Mapping[int, Record]) -> list[Group]:
    groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
    for rank, record in records.items():
        for log in record.groups:
            key = (log.name, log.backend, log.ranks)
            groups.setdefault(key, Group(*key)).add(rank, log)
    return list(groups.values())


def named(ranks: Iterable[int]) -> str:
    """Ranks, for a person: ``ranks 0 to 3 and 7``."""
    parts = run_texts(sorted(set(ranks)), to=" to ", least=3)
    words = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
    one = len(parts) == 1 and parts[0].isdecimal()
    return f"{'rank' if one else 'ranks'} {words}"


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
    """The waits: of each rank and group the first collective that runs or failed; messages."""
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
    """For each rank that cannot continue, the waits that hold it up; given-up waits count."""
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
    """Cycles of waits; nobody alone holds up a message that may come from several ranks."""
    return cycles(
        wait
        for waits_of_rank in held_up.values()
        for wait in waits_of_rank
        if wait.entry.peer != ANY_PEER or len(wait.awaited) == 1
    )
