"""Cycles of waits: found where there is one, and proven only then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.comm.waits.cycles import CycleSearch, SeenMessage, WaitRecord, describe, held_up_by

#: A rank's program: the groups whose next operation it calls, in order.
Programs = list[list[str]]


@dataclass
class _Rank:
    """A rank that runs its program, publishes its wait and reads others', in small steps."""

    rank: int
    program: list[str]
    world: dict[int, _Rank]
    published: dict[int, WaitRecord]
    position: int = 0
    tick: int = 0
    search: CycleSearch = field(default_factory=CycleSearch)
    cycle: list[int] = field(default_factory=list)

    def calls(self, group: str, upto: int) -> int:
        return self.program[:upto].count(group)

    def called(self, group: str) -> int:
        """Operations that it has called; it waits in the last one."""
        return self.calls(group, self.position + 1)

    def wait(self) -> tuple[str, int] | None:
        if self.position >= len(self.program):
            return None
        group = self.program[self.position]
        return group, self.called(group)

    def members(self, group: str) -> list[_Rank]:
        return [each for each in self.world.values() if group in each.program]

    def advance(self) -> None:
        wait = self.wait()
        if wait and all(each.called(wait[0]) >= wait[1] for each in self.members(wait[0])):
            self.position += 1

    def look(self) -> Iterator[None]:
        """The steps of a look: facts, later publishing, later reading one by one."""
        wait = self.wait()
        if wait is None:
            return
        held_up = []
        for other in self.world.values():
            theirs = other.wait()
            if other is self or theirs is None or self not in self.members(theirs[0]):
                continue
            if theirs[1] > self.called(theirs[0]):
                held_up.append((other.rank, *theirs))
        self.tick += 1
        awaited = tuple(e.rank for e in self.members(wait[0]) if e is not self)
        own = WaitRecord(*wait, awaited, None, None, self.rank, self.position, self.tick)
        own = own._replace(held_up=tuple(held_up))
        yield
        self.published[self.rank] = own
        yield
        # The search reads at once; to read one by one, what it will be told is collected before.
        copies = {}
        for rank in self.world:
            if rank in self.published:
                copies[rank] = self.published[rank]
            yield
        self.cycle = [each.rank for each in self.search.look(own, copies.get)]


def _run(programs: Programs, seed: int, steps: int) -> dict[int, _Rank]:
    world: dict[int, _Rank] = {}
    published: dict[int, WaitRecord] = {}
    for rank, program in enumerate(programs):
        world[rank] = _Rank(rank, program, world, published)
    draw = random.Random(seed)
    looks: dict[int, Iterator[None]] = {}
    for _ in range(steps):
        each = world[draw.randrange(len(world))]
        if draw.random() < 0.2:
            each.advance()
            continue
        look = looks.setdefault(each.rank, each.look())
        if next(look, "over") == "over":
            del looks[each.rank]
        if each.cycle:
            break
    return world


@st.composite
def _legal(draw: st.DrawFn) -> Programs:
    """Programs whose operations have one order for all ranks."""
    size = draw(st.integers(2, 4))
    ranks = st.sets(st.integers(0, size - 1), min_size=2)
    members = draw(st.lists(ranks, min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(members) - 1), min_size=1, max_size=8))
    return [[f"g{g}" for g in order if rank in members[g]] for rank in range(size)]


@given(_legal(), st.integers(0, 2**32))
def test_legal_programs_are_in_no_cycle(programs: Programs, seed: int) -> None:
    world = _run(programs, seed, steps=300)
    assert not any(each.cycle for each in world.values())


@given(st.integers(2, 5), st.integers(0, 2**32))
def test_a_ring_of_any_length_is_found(size: int, seed: int) -> None:
    programs = [[f"g{rank}", f"g{(rank - 1) % size}"] for rank in range(size)]
    world = _run(programs, seed, steps=2000 * size)
    (cycle,) = [each.cycle for each in world.values() if each.cycle]
    assert sorted(cycle) == list(range(size))


@given(_legal(), st.integers(0, 2**32))
def test_a_cycle_is_one_of_ranks_that_never_go_on(programs: Programs, seed: int) -> None:
    """Swap two operations on one rank: if a cycle is told, none of its ranks can move any more."""
    long = [program for program in programs if len(program) > 1]
    if long:
        long[0][0], long[0][-1] = long[0][-1], long[0][0]
    world = _run(programs, seed, steps=300)
    told = {rank for each in world.values() for rank in each.cycle}
    before = {rank: world[rank].position for rank in told}
    for _ in range(50):
        for each in world.values():
            each.advance()
    assert before == {rank: world[rank].position for rank in told}


def _record(
    rank: int, group: str, awaited: tuple[int, ...], held: tuple[tuple[int, str, int], ...]
) -> WaitRecord:
    return WaitRecord(group, 1, awaited, None, None, rank, 1, 1, held, f"barrier of {group}")


def test_a_rank_that_is_stopped_is_in_no_cycle() -> None:
    """Its record stays what it was, however often it is read."""
    search = CycleSearch()
    stale = _record(1, "b", (0,), ((0, "a", 1),))
    for tick in range(1, 20):
        own = _record(0, "a", (1,), ((1, "b", 1),))._replace(tick=tick)
        assert not search.look(own, {1: stale}.get)


def test_records_survive_the_way_through_a_store() -> None:
    record = _record(3, "tp", (1, 2), ((1, "dp", 4),))
    assert WaitRecord.decode(record.encode().encode()) == record


def test_whoever_waits_for_a_rank_of_the_cycle_is_told() -> None:
    cycle = [_record(0, "a", (1,), ((1, "b", 1), (2, "c", 1))), _record(1, "b", (0,), ())]
    waits = {2: _record(2, "c", (0,), ((3, "d", 1),)), 3: _record(3, "other", (), ())}
    assert [each.rank for each in held_up_by(cycle, waits.get)] == [0, 1, 2]


@pytest.mark.parametrize(("size", "lines"), [(2, 3), (9, 7)])
def test_the_words_name_each_wait_up_to_a_few(size: int, lines: int) -> None:
    cycle = [_record(rank, f"g{rank}", (), ()) for rank in range(size)]
    text = describe(cycle).splitlines()
    assert len(text) == lines
    assert "rank 0 waits for rank 1 in barrier of g0" in text[1]


def test_who_holds_up_a_wait_for_a_message() -> None:
    """Whoever waits, and has nothing under way that would fit."""

    def record(rank: int, *messages: SeenMessage, known: bool = True) -> WaitRecord:
        wait = messages[0] if messages else None
        return WaitRecord("g", 1, (1 - rank,), wait, messages if known else None, rank, 1, 1)

    receive = record(0, SeenMessage("g", False, 1, 7))
    assert record(1).holds_up(receive)
    assert record(1, SeenMessage("g", False, 0, 7)).holds_up(receive)
    assert record(1, SeenMessage("g", True, 0, 8)).holds_up(receive)
    assert record(1, SeenMessage("h", True, 0, 7)).holds_up(receive)
    assert not record(1, SeenMessage("g", True, 0, 7)).holds_up(receive)
    assert not record(1, known=False).holds_up(receive)
    send = record(0, SeenMessage("g", True, 1, 7))
    assert not record(1, SeenMessage("g", False, -1, 7)).holds_up(send)
    assert WaitRecord.decode(send.encode().encode()) == send
