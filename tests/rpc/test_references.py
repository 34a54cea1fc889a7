"""Counting references: whatever the order of messages, no value ends too early or stays."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.errors import PeerLostError
from tilework.rpc.message import NEW, MessageKind, Ref
from tilework.rpc.references import Entry, Owned, References

RANKS = 3
MOST_VALUES = 2


class Value:
    """Something whose end can be observed."""


@dataclass
class Letter:
    """A message on its way."""

    kind: MessageKind
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
        def send(kind: MessageKind, to: int, number: int, refs: Sequence[Ref]) -> None:
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
        self.lines[rank, to].append(Letter(MessageKind.CALL, 0, [ref]))
        self.mine[rank].append(entry)

    def hand_over(self, rank: int, entry: Entry, to: int) -> None:
        ref = self.ranks[rank].outgoing(entry, to)
        self.lines[rank, to].append(Letter(MessageKind.CALL, 0, [ref]))

    def fail_to_hand_over(self, rank: int, entry: Entry, to: int) -> None:
        self.ranks[rank].unsent([self.ranks[rank].outgoing(entry, to)], to)

    def drop(self, rank: int, entry: Entry) -> None:
        self.mine[rank].remove(entry)

    # What agents do.

    def flush(self, rank: int) -> None:
        self.ranks[rank].flush()

    def deliver(self, sender: int, to: int) -> None:
        letter, rank = self.lines[sender, to].popleft(), self.ranks[to]
        if letter.kind == MessageKind.CALL:
            (ref,) = letter.refs
            self.arrive(rank.incoming(ref, sender), to, makes=ref.pin == NEW)
        elif letter.kind == MessageKind.ADD:
            rank.add(letter.refs[0], sender, letter.number)
        elif letter.kind == MessageKind.ADDED:
            rank.added(letter.number)
        elif letter.kind == MessageKind.HOLDS:
            rank.holds(letter.number)
        else:
            assert letter.kind == MessageKind.DROP
            rank.drop(letter.refs[0].id, sender, letter.number)

    def arrive(self, entry: Entry, to: int, makes: bool) -> None:
        if makes:
            assert isinstance(entry, Owned)
            value = Value()
            self.values[entry.id] = weakref.ref(value)
            entry.complete(value)
        self.mine[to].append(entry)

    def settle(self) -> None:
        """Until nothing is on its way."""
        while any(self.lines.values()):
            for line in [line for line, letters in self.lines.items() if letters]:
                self.deliver(*line)
        for rank in range(RANKS):
            self.flush(rank)
        if any(self.lines.values()):
            self.settle()

    def check(self) -> None:
        """Whatever anyone has is alive."""
        for entry in (entry for mine in self.mine for entry in mine):
            if entry.id in self.values:
                assert self.values[entry.id]() is not None, entry.id

    def step(self, kind: int, choice: int) -> None:
        """One of the things that may happen now."""
        ranks = range(RANKS)
        having = [(rank, entry) for rank in ranks for entry in self.mine[rank]]
        handing = [(rank, entry, to) for rank, entry in having for to in ranks]
        lines = [line for line, letters in self.lines.items() if letters]
        few = len(self.values) < MOST_VALUES
        happenings: list[list[Callable[[], None]]] = [
            [partial(self.own, rank) for rank in ranks if few],
            [partial(self.remote, rank, to) for rank in ranks for to in ranks if few],
            [partial(self.hand_over, *each) for each in handing],
            [partial(self.fail_to_hand_over, *each) for each in handing],
            [partial(self.drop, *each) for each in having],
            [partial(self.flush, rank) for rank in ranks],
        ]
        happenings += [[partial(self.deliver, *line) for line in lines]] * 3
        now = happenings[kind % len(happenings)]
        if now:
            now[choice % len(now)]()


def test_who_hands_a_reference_on_keeps_it_until_the_owner_knows() -> None:
    net = Net()
    net.own(0)
    (entry,) = net.mine[0]
    net.hand_over(0, entry, 1)
    net.deliver(0, 1)
    net.drop(0, entry)
    del entry
    net.hand_over(1, net.mine[1][0], 2)
    net.drop(1, net.mine[1][0])
    net.deliver(1, 2)
    for _ in range(3):  # whatever rank 1 says meanwhile comes first
        net.flush(1)
        for line in ((2, 1), (1, 0)):
            if net.lines[line]:
                net.deliver(*line)
        net.check()
    net.settle()
    net.check()
    assert net.ranks[1].sizes == (0, 0)
    assert net.ranks[0].sizes == (1, 0)


def test_a_reference_comes_to_the_owner_before_the_call_that_makes_the_value() -> None:
    """Messages of two ranks have no order."""
    net = Net()
    net.remote(0, 1)
    (entry,) = net.mine[0]
    net.hand_over(0, entry, 2)
    for line in ((0, 2), (2, 1), (1, 2), (2, 0)):
        net.deliver(*line)  # the owner counts rank 2, which tells rank 0
    net.drop(0, entry)
    del entry
    net.flush(0)
    while net.lines[0, 1]:
        net.deliver(0, 1)
    net.mine[1].clear()  # the call has ended
    net.settle()
    net.check()
    assert net.ranks[1].sizes == (1, 0)
    net.mine[2].clear()
    net.settle()
    assert net.ranks[1].sizes == (0, 0)


def test_the_rank_whose_call_would_make_the_value_is_lost() -> None:
    net = Net()
    net.remote(0, 1)
    net.hand_over(0, net.mine[0][0], 2)
    net.deliver(0, 2)
    net.deliver(2, 1)
    net.hand_over(2, net.mine[2][0], 1)
    while net.lines[2, 1]:
        net.deliver(2, 1)
    (entry,) = net.mine[1]
    assert isinstance(entry, Owned)
    net.ranks[1].lost(0)
    with pytest.raises(PeerLostError, match="rank 0 was lost before the call for the value came"):
        entry.get()


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 80)), max_size=60)


@settings(deadline=None, max_examples=500)
@given(STEPS)
def test_no_value_ends_too_early_or_stays(steps: list[tuple[int, int]]) -> None:
    net = Net()
    for kind, choice in steps:
        net.step(kind, choice)
        net.check()
    net.settle()
    net.check()
    for mine in net.mine:
        mine.clear()
    net.settle()
    assert [rank.sizes for rank in net.ranks] == [(0, 0)] * RANKS
    assert not [id for id, value in net.values.items() if value() is not None]


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(0, RANKS - 1))
def test_who_is_lost_holds_nothing(steps: list[tuple[int, int]], lost: int) -> None:
    net = Net()
    for kind, choice in steps:
        net.step(kind, choice)
    for line in net.lines:
        if lost in line:  # nothing comes from it any more, and what is sent to it goes nowhere
            net.lines[line] = deque(maxlen=0)
    survivors = [rank for rank in range(RANKS) if rank != lost]
    for rank in survivors:
        net.ranks[rank].lost(lost)
    net.mine[lost].clear()
    net.settle()
    for rank in survivors:
        net.mine[rank].clear()
    net.settle()
    assert [net.ranks[rank].sizes for rank in survivors] == [(0, 0)] * len(survivors)
