"""Ranks that would part: compared by group, as ranks compare their captured programs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tilework.comm.per_call.internal import PretendedCall, Sizes
from tilework.wait_graph import cycles

#: What a rank calls: by rank, all calls in order.
Calls = Mapping[int, Sequence[PretendedCall]]


@dataclass(frozen=True)
class Mismatch:
    """Ranks that would get an error, or wait forever, with a line for each.

    Attributes:
        ranks: The ranks.
        text: The fault.
        sites: By rank in ``ranks``, ``file:line in function`` of the program.
    """

    ranks: tuple[int, ...]
    text: str
    sites: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"  rank {rank}: {site or 'the program has ended'}"
            for rank, site in zip(self.ranks, self.sites, strict=True)
        ]
        return "\n".join([self.text, *lines])


@dataclass(frozen=True)
class _Wait:
    """A rank that would wait forever."""

    rank: int
    awaited: tuple[int, ...]
    call: PretendedCall


def mismatches_of(calls: Calls) -> list[Mismatch]:
    """The faults of a job whose ranks make ``calls``. Ranks that did not run are left out.

    Calls are played in order: a collective goes on once all ranks of the group that ran have come,
    a receive once the message was sent. What is left waits for ranks in a circle, for a rank that
    has ended, or for a message that nobody sends.
    """
    different = _different(calls)
    if different:
        return different
    player = _Player(calls)
    return _stuck(player.play(), player)


def passed_times(
    calls: Calls, computed: Mapping[int, Sequence[float]], prices: Prices
) -> dict[int, list[float]] | None:
    """By rank, when it has passed each call; None if ranks wait forever.

    Args:
        calls: As for :func:`mismatches_of`.
        computed: By rank, the seconds that it has computed before each call, all together.
        prices: What a call takes once all ranks have come.
    """
    player = _Player(calls, computed, prices)
    return None if player.play() else player.passed


@dataclass(frozen=True)
class Prices:
    """The durations of calls.

    Attributes:
        seconds: The seconds of a call.
        overlaps: True if data moves while ranks compute; else who waits moves it.
    """

    seconds: Callable[[PretendedCall], float]
    overlaps: bool = False


def _different(calls: Calls) -> list[Mismatch]:
    """Ranks that call different things: the first of each group, and of each pair with messages."""
    found = []
    for by_rank in _in_order(calls).values():
        first, *others = by_rank
        uneven = _uneven(by_rank)
        found += [] if uneven is None else [uneven]
        for other in others if uneven is None else ():
            pairs = zip(by_rank[first], by_rank[other], strict=False)
            numbered = enumerate(pairs, 1)
            odd = next(((i, a, b) for i, (a, b) in numbered if _facts(a) != _facts(b)), None)
            if odd is not None:
                found.append(_odd_pair((first, other), *odd))
                break
    return found


def _uneven(by_rank: Mapping[int, Sequence[PretendedCall]]) -> Mismatch | None:
    """Two ranks: the first has another number of elements for the second than that takes."""
    for number, same in enumerate(zip(*by_rank.values(), strict=False), 1):
        sizes = {call.sizes for call in same}
        if len(sizes) == 1 and not any(isinstance(each, tuple) for each in same[0].sizes):
            sent, taken = same[0].sizes
            if sent == taken or None in (sent, taken):
                continue
        places = {rank: same[0].ranks.index(rank) for rank in by_rank}
        for (a, mine), (b, theirs) in product(zip(by_rank, same, strict=True), repeat=2):
            sent, taken = _part(mine.sizes[0], places[b]), _part(theirs.sizes[1], places[a])
            if sent != taken and None not in (sent, taken):
                return Mismatch(
                    (a, b),
                    f"in collective {number} of group {mine.group!r}, {mine.text}, rank {a} has "
                    f"{sent} elements for rank {b}, which takes {taken}",
                    (mine.site, theirs.site),
                )
    return None


def _part(sizes: Sizes, place: int) -> int | None:
    return sizes[place] if isinstance(sizes, tuple) else sizes


def _in_order(calls: Calls) -> dict[tuple[object, ...], dict[int, list[PretendedCall]]]:
    """By group, or by pair with messages, what each rank calls."""
    found: dict[tuple[object, ...], dict[int, list[PretendedCall]]] = defaultdict(dict)
    for rank, each in calls.items():
        for call in each:
            if call.waits_for is None and call.peer != -1:
                found[_key(rank, call)].setdefault(rank, []).append(call)
    return found


def _key(rank: int, call: PretendedCall) -> tuple[object, ...]:
    """The things that are matched in order: collectives of a group, messages of a pair."""
    if call.peer is None:
        return call.group, call.ranks
    ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
    return call.group, call.ranks, *ends, call.facts[3]


def _facts(call: PretendedCall) -> tuple[object, ...]:
    """The facts that must be equal on all sides."""
    return call.facts if call.peer is None else call.facts[1:]


def _odd_pair(ranks: tuple[int, int], number: int, a: PretendedCall, b: PretendedCall) -> Mismatch:
    which = "collective" if a.peer is None else "message"
    return Mismatch(
        ranks,
        f"{which} {number} of group {a.group!r} is {a.text} on rank {ranks[0]} and {b.text} on "
        f"rank {ranks[1]}{_reason(a, b)}",
        (a.site, b.site),
    )


def _reason(a: PretendedCall, b: PretendedCall) -> str:
    names = ("operation", "dtype", "reduction", "root", "shape", "origin of tensors")
    if a.peer is not None:
        return ""
    odd = [name for name, x, y in zip(names, a.facts, b.facts, strict=False) if x != y]
    return f": they differ in {' and '.join(odd)}" if odd else ""


class _Player:
    """Plays the calls of all ranks in order, as far as no rank waits forever."""

    def __init__(
        self,
        calls: Calls,
        computed: Mapping[int, Sequence[float]] | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.calls, self._computed, self._prices = calls, computed, prices
        #: By rank, when it has passed each call; by event, when the last rank came.
        self.passed: dict[int, list[float]] = {rank: [] for rank in calls}
        self._begun: dict[tuple[object, ...], float] = defaultdict(float)
        self.place = dict.fromkeys(calls, 0)
        groups = {call.ranks for each in calls.values() for call in each}
        self._members = {ranks: sum(rank in calls for rank in ranks) for ranks in groups}
        #: By event (a key and a number): the ranks that have come, and those that wait.
        self._come: Counter[tuple[object, ...]] = Counter()
        self._waiting: dict[tuple[object, ...], list[int]] = defaultdict(list)
        #: By rank and place in the calls: the event.
        self._events: dict[tuple[int, int], tuple[object, ...]] = {}
        self._count: Counter[tuple[object, ...]] = Counter()
        self._ready = deque(calls)

    def play(self) -> dict[int, PretendedCall]:
        """By rank, the call that the rank waits in forever."""
        while self._ready:
            rank = self._ready.popleft()
            calls = self.calls[rank]
            while self.place[rank] < len(calls) and self._passes(rank, calls[self.place[rank]]):
                self.place[rank] += 1
        return {
            rank: self.calls[rank][i] for rank, i in self.place.items() if i < len(self.calls[rank])
        }

    def _passes(self, rank: int, call: PretendedCall) -> bool:
        """Enter a call; False if the rank has to wait."""
        here = rank, self.place[rank]
        if call.waits_for is not None:
            event, blocks = self._events[rank, call.waits_for], True
        else:
            if here not in self._events:
                self._enter(rank, here, call)
            event, blocks = self._events[here], not call.is_async
        if not blocks or self._is_over(event, call):
            self._note_time(rank, event if blocks else None)
            return True
        self._waiting[event].append(rank)
        return False

    def awaited(self, rank: int) -> Iterable[int]:
        """The ranks that have not come to what a rank waits for."""
        place = self.place[rank]
        call = self.calls[rank][place]
        event = self._events[rank, place if call.waits_for is None else call.waits_for]
        if call.peer is not None:
            return (call.peer,)
        come = {other for (other, _), entered in self._events.items() if entered == event}
        return [each for each in call.ranks if each in self.calls and each not in come]

    def _arrived(self, rank: int) -> float:
        """The time at which a rank comes to the next call."""
        if self._computed is None:
            return 0.0
        place, computed = self.place[rank], self._computed[rank]
        if not place:
            return computed[0]
        return self.passed[rank][-1] + computed[place] - computed[place - 1]

    def _note_time(self, rank: int, awaited: tuple[object, ...] | None) -> None:
        """Note when a rank has passed a call, which waits for an event or for none."""
        if self._prices is None:
            return
        time, call = self._arrived(rank), self.calls[rank][self.place[rank]]
        if awaited is not None:
            of = call if call.waits_for is None else self.calls[rank][call.waits_for]
            begun, seconds = self._begun[awaited], self._prices.seconds(of)
            if self._prices.overlaps:
                time = max(time, begun + seconds)
            elif of.kind != "send":
                time = max(time, begun) + seconds
        self.passed[rank].append(time)

    def _enter(self, rank: int, here: tuple[int, int], call: PretendedCall) -> None:
        key = _key(rank, call)
        end = rank, None if call.peer is None else call.kind, key  # collectives are one sequence
        self._count[end] += 1
        event = self._events[here] = (key, self._count[end])
        if call.kind != "recv" or call.peer not in self.calls:
            self._begun[event] = max(self._begun[event], self._arrived(rank))
        if call.kind != "recv":
            self._come[event] += 1
            if self._is_over(event, call):
                self._ready.extend(self._waiting.pop(event, ()))

    def _is_over(self, event: tuple[object, ...], call: PretendedCall) -> bool:
        if call.peer is None:
            return self._come[event] >= self._members[call.ranks]
        return self._come[event] > 0 or call.peer not in self.calls


def _stuck(left: Mapping[int, PretendedCall], player: _Player) -> list[Mismatch]:
    """The faults that make ranks wait forever."""
    waits = [_Wait(rank, tuple(player.awaited(rank)), call) for rank, call in left.items()]
    circles = cycles(waits)
    found = [
        Mismatch(
            tuple(wait.rank for wait in circle),
            "ranks wait for each other in a circle: "
            + ", ".join(f"rank {wait.rank} in {wait.call.text}" for wait in circle),
            tuple(wait.call.site for wait in circle),
        )
        for circle in circles
    ]
    if found:
        return found
    for wait in waits:
        ended = [rank for rank in wait.awaited if rank not in left]
        if ended:
            other, call, calls = ended[0], wait.call, player.calls
            last = calls[other][-1].site if calls[other] else ""
            why = "sends no such message" if call.kind == "recv" else "does not call it"
            found.append(
                Mismatch(
                    (wait.rank, other),
                    f"rank {wait.rank} waits in {call.text} of group {call.group!r}, and rank "
                    f"{other} {why}: the last call of rank {other} is below",
                    (call.site, last),
                )
            )
            break
    return found
