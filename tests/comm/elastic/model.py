"""A model of ranks that shrink a group: the real protocol under a scheduler with its own clock."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tilework.comm.elastic.consensus import (
    Decision,
    NoGroupError,
    Participant,
    Steps,
    failed,
    survive,
)
from tilework.comm.elastic.registers import Registers

PATIENCE = 1000.0
#: A stopped rank comes back after longer than that.
STOPPED = 3500.0
MOST_STEPS = 20_000


class DictRegisters(Registers):
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def write(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def read(self, key: str) -> str | None:
        return self.values.get(key)

    def leave(self, rank: int) -> None:
        pass


@dataclass
class ModelBuilder:
    """A group is made once all of its members have come to the same place."""

    participant: Participant
    joined: dict[int, set[int]]
    tries: int = 0

    def build(self, decision: Decision) -> Steps[str | None]:
        self.joined[decision.round].add(self.participant.me)
        deadline = self.participant.clock() + PATIENCE
        while True:
            yield False
            if self.joined[decision.round].issuperset(decision.members):
                return None
            yield False
            if failed(self.participant, decision.round):
                return "given up"
            if self.participant.lost(decision.members) or self.participant.clock() >= deadline:
                return "a member is missing"
            yield True

    def discard(self) -> None:
        self.tries += 1

    def remark(self) -> str:
        return f"by {self.participant.me}"


#: A rank's end: the members of its group; None if it is out.
Result = tuple[int, ...] | None


@dataclass
class Model:
    """``size`` ranks, of which some may be killed or stopped at any step."""

    size: int
    now: float = 0.0
    steps: int = 0
    dead: set[int] = field(default_factory=set)
    woken_at: dict[int, float] = field(default_factory=dict)
    ever_stopped: set[int] = field(default_factory=set)
    results: dict[int, Result] = field(default_factory=dict)
    #: The rank whose last step was a pause.
    paused: int = -1

    def __post_init__(self) -> None:
        self.registers = DictRegisters()
        joined: dict[int, set[int]] = defaultdict(set)
        self.running: dict[int, Steps[Decision]] = {}
        for me in range(self.size):
            participant = Participant(me, self.registers, self._lost, lambda: self.now, PATIENCE)
            builder = ModelBuilder(participant, joined)
            self.running[me] = survive(participant, range(self.size), builder, 2 * self.size + 3)

    def _lost(self, asked: Collection[int]) -> set[int]:
        return self.dead.intersection(asked)

    def kill(self, rank: int) -> None:
        if len(self.dead) < self.size - 1:
            self.dead.add(rank)
            self.running.pop(rank, None)

    def stop(self, rank: int) -> None:
        self.woken_at[rank] = self.now + STOPPED
        self.ever_stopped.add(rank)

    def ready(self) -> list[int]:
        ready = [rank for rank in self.running if self.woken_at.get(rank, 0.0) <= self.now]
        if not ready and self.running:
            self.now = min(self.woken_at[rank] for rank in self.running)
            return self.ready()
        return ready

    def step(self, rank: int) -> bool:
        """Let a rank take a step; True if it pauses, or has ended."""
        self.steps += 1
        assert self.steps < MOST_STEPS, "the protocol does not end"
        try:
            pauses = next(self.running[rank])
        except StopIteration as end:
            del self.running[rank]
            members = end.value.members
            self.results[rank] = members if rank in members else None
            return True
        except NoGroupError as error:
            raise AssertionError(f"rank {rank} gave up: {error}") from error
        self.now += 20.0 if pauses else 0.01
        self.paused = rank if pauses else -1
        return pauses

    def run(self, choose: Callable[[Model], int]) -> None:
        while self.running:
            rank = choose(self)
            if rank in self.running:
                self.step(rank)
        self.check()

    def check(self) -> None:
        """The promises of docs/algorithms/membership.md."""
        groups = {members for members in self.results.values() if members is not None}
        assert len(groups) <= 1, f"two groups: {self.results}"
        for members in groups:
            inside = {rank for rank, result in self.results.items() if result is not None}
            assert inside - self.dead == set(members) - self.dead, f"waited for: {self.results}"
        steady = set(self.results) - self.dead - self.ever_stopped
        out = {rank for rank in steady if self.results[rank] is None}
        assert not out, f"ranks {out} are out for nothing: {self.results}"


def in_turn() -> Callable[[Model], int]:
    """A scheduler that lets every rank take one step after the other."""
    turns = itertools.count()

    def choose(model: Model) -> int:
        ready = model.ready()
        return ready[next(turns) % len(ready)]

    return choose
