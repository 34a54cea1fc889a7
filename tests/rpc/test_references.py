"""Counting references: whatever the order of messages, no value ends too early or stays."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.rpc.entries import Entry, Owned
from tilework.rpc.message import Kind, Ref
from tilework.rpc.references import References

RANKS = 3


class Value:
    """Something whose end can be observed."""


@dataclass
class Letter:
    """A message on its way."""

    kind: Kind
    number: int
    refs: Sequence[Ref]


@dataclass
class Net:
    """Ranks whose messages arrive when the test says so; between two ranks, in order."""

    lines: dict[tuple[int, int], deque[Letter]] = field(default_factory=dict)
    ranks: list[References] = field(default_factory=list)
    #: What the program on each rank has.
    mine: list[list[Entry]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    values: dict[Any, weakref.ref[Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(RANKS):
            for to in range(RANKS):
                self.lines[rank, to] = deque()
            self.ranks.append(References(rank, self._sender(rank), lambda: None))

    def _sender(self, rank: int) -> Any:
        def send(kind: Kind, to: int, number: int, refs: Sequence[Ref]) -> None:
            self.lines[rank, to].append(Letter(kind, number, refs))

        return send

    # What programs do.

    def own(self, rank: int) -> None:
        value = Value()
        entry = self.ranks[rank].own(value)
        self.values[entry.id] = weakref.ref(value)
        self.mine[rank].append(entry)

    def remote(self, rank: int, to: int) -> None:
        entry, ref = self.ranks[rank].create(to)
        self.lines[rank, to].append(Letter(Kind.CALL, 0, [ref]))
        self.mine[rank].append(entry)

    def hand_over(self, rank: int, to: int, which: int) -> None:
        if self.mine[rank]:
            entry = self.mine[rank][which % len(self.mine[rank])]
            ref = self.ranks[rank].outgoing(entry, to)
            self.lines[rank, to].append(Letter(Kind.CALL, 0, [ref]))

    def fail_to_hand_over(self, rank: int, to: int, which: int) -> None:
        if self.mine[rank]:
            entry = self.mine[rank][which % len(self.mine[rank])]
            self.ranks[rank].unsent([self.ranks[rank].outgoing(entry, to)], to)

    def drop(self, rank: int, which: int) -> None:
        if self.mine[rank]:
            del self.mine[rank][which % len(self.mine[rank])]

    # What agents do.

    def flush(self, rank: int) -> None:
        self.ranks[rank].flush()

    def deliver(self, sender: int, to: int) -> None:
        if not self.lines[sender, to]:
            return
        letter, rank = self.lines[sender, to].popleft(), self.ranks[to]
        if letter.kind == Kind.CALL:
            self.arrive(rank.incoming(letter.refs[0], sender), to)
        elif letter.kind == Kind.ADD:
            rank.add(letter.refs[0], sender, letter.number)
        elif letter.kind == Kind.ADDED:
            rank.added(letter.number)
        elif letter.kind == Kind.HOLDS:
            rank.holds(letter.number)
        else:
            assert letter.kind == Kind.DROP
            rank.drop(letter.refs[0].id, sender, letter.number)

    def arrive(self, entry: Entry, to: int) -> None:
        if isinstance(entry, Owned) and entry.pending is not None:
            value = Value()
            self.values[entry.id] = weakref.ref(value)
            entry.complete(value)
        self.mine[to].append(entry)

    def settle(self) -> None:
        """Until nothing is on its way."""
        while any(self.lines.values()):
            for sender, to in list(self.lines):
                self.deliver(sender, to)
        for rank in range(RANKS):
            self.flush(rank)
        if any(self.lines.values()):
            self.settle()

    def check(self) -> None:
        """Whatever anyone has is alive."""
        for entry in (entry for mine in self.mine for entry in mine):
            if entry.id in self.values:
                assert self.values[entry.id]() is not None, entry.id


_rank = st.integers(0, RANKS - 1)
_which = st.integers(0, 9)
STEPS = st.one_of(
    st.tuples(st.just("own"), _rank),
    st.tuples(st.just("remote"), _rank, _rank),
    st.tuples(st.just("hand_over"), _rank, _rank, _which),
    st.tuples(st.just("hand_over"), _rank, _rank, _which),
    st.tuples(st.just("fail_to_hand_over"), _rank, _rank, _which),
    st.tuples(st.just("drop"), _rank, _which),
    st.tuples(st.just("drop"), _rank, _which),
    st.tuples(st.just("flush"), _rank),
    st.tuples(st.just("deliver"), _rank, _rank),
    st.tuples(st.just("deliver"), _rank, _rank),
    st.tuples(st.just("deliver"), _rank, _rank),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(STEPS, max_size=60))
def test_no_value_ends_too_early_or_stays(steps: list[tuple[Any, ...]]) -> None:
    net = Net()
    for name, *arguments in steps:
        getattr(net, name)(*arguments)
        net.check()
    net.settle()
    net.check()
    for mine in net.mine:
        mine.clear()
    net.settle()
    assert [rank.sizes for rank in net.ranks] == [(0, 0)] * RANKS
    assert not [id for id, value in net.values.items() if value() is not None]


@settings(deadline=None, max_examples=150)
@given(st.lists(STEPS, max_size=50), st.integers(0, RANKS - 1))
def test_who_is_lost_holds_nothing(steps: list[tuple[Any, ...]], lost: int) -> None:
    net = Net()
    for name, *arguments in steps:
        getattr(net, name)(*arguments)
    for sender, to in net.lines:
        if lost in (sender, to):
            net.lines[sender, to].clear()
    survivors = [rank for rank in range(RANKS) if rank != lost]
    for rank in survivors:
        net.ranks[rank].lost(lost)
    net.mine[lost].clear()
    for line in list(net.lines):
        if lost in line:  # what is sent to it goes nowhere
            net.lines[line] = deque(maxlen=0)
    net.settle()
    for rank in survivors:
        net.mine[rank].clear()
    net.settle()
    assert [net.ranks[rank].sizes for rank in survivors] == [(0, 0)] * len(survivors)
