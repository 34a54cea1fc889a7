"""The list scheduler: a rank that is free does the most urgent action whose needs are met."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilework.parallel.pipelines.actions import Action, Kind, StageCost

Orders = tuple[tuple[Action, ...], ...]
#: From a microbatch, and the place of a stage among the rank's stages: the less, the more urgent.
Key = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """Limits that ranks keep to, and the order among actions that are ready."""

    #: For each stage: the most live activations of the rank after a forward of the stage.
    live: Sequence[int]
    #: For each stage: the most microbatches that are forward, but not yet backward.
    flight: Sequence[int]
    #: True to cut backward in two halves.
    split: bool = False
    #: True if backwards of a rank start after all of the rank's forwards.
    phased: bool = False
    forward_key: Key = lambda microbatch, place: (-place, microbatch)
    backward_key: Key = lambda microbatch, place: (microbatch, -place)

    @property
    def urgencies(self) -> tuple[tuple[Kind, ...], ...]:
        """The orders of kinds that are worth trying."""
        if self.split:
            fill_later: tuple[Kind, ...] = ("forward", "input_gradient", "weights")
            return fill_later, ("forward", "weights", "input_gradient")
        return (("forward", "backward"),) if self.phased else (
            ("forward", "backward"), ("backward", "forward"),
        )  # fmt: skip


def list_orders(
    home: Sequence[int], microbatches: int, rules: Rules, costs: Sequence[StageCost]
) -> list[Orders]:
    """Orders of actions that are worth comparing: one at least, if a microbatch fits the limits.

    Orders for equal costs are among them: where costs differ, these may be better.
    """
    equal = (StageCost(),) * len(home)
    runs = product(rules.urgencies, dict.fromkeys((tuple(costs), equal)))
    tried = [_Scheduler(home, microbatches, rules, kinds, planned) for kinds, planned in runs]
    found = [each.orders() for each in tried if each.run()]
    if not found:
        # Limits may stop all ranks, but not if every microbatch that has begun has room to end.
        few = min(most // home.count(rank) for rank, most in zip(home, rules.live, strict=True))
        rules = replace(rules, flight=[few] * len(home))
        careful = _Scheduler(home, microbatches, rules, rules.urgencies[0], costs)
        careful.run()
        found = [careful.orders()]
    return found


class _Scheduler:
    """Makes an order of actions in simulated time, the most urgent kinds first.

    After a rank's last forward, "weights" come last.
    """

    def __init__(
        self,
        home: Sequence[int],
        microbatches: int,
        rules: Rules,
        urgency: Sequence[Kind],
        costs: Sequence[StageCost],
    ) -> None:
        self.home, self.microbatches, self.rules, self.costs = home, microbatches, rules, costs
        ranks = max(home) + 1
        self._rows: list[list[Action]] = [[] for _ in range(ranks)]
        self._own = [[s for s, rank in enumerate(home) if rank == r] for r in range(ranks)]
        self._place = {s: n for own in self._own for n, s in enumerate(own)}
        self._live = [0] * ranks
        self._free_at = [0.0] * ranks
        self._ends: dict[Action, float] = {}
        self._backward: Kind = "input_gradient" if rules.split else "backward"
        self._level = {kind: level for level, kind in enumerate(urgency)}
        self._next = {(kind, stage): 0 for kind in urgency for stage in range(len(home))}
        self._left = [microbatches * len(own) for own in self._own]

    def run(self) -> bool:
        """Do all actions; False if limits stopped all ranks."""
        events = [(0.0, rank) for rank in range(len(self._rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self._free_at[rank]:
                continue
            action = min(self._ready(rank, now), key=self._urgency, default=None)
            if action is None:
                continue
            self._do(rank, action, now)
            stage = action.stage
            for other in {self.home[s] for s in (stage, max(stage - 1, 0))} | set(
                self.home[stage + 1 : stage + 2]
            ):
                heapq.heappush(events, (self._free_at[rank], other))
        return all(number == self.microbatches for number in self._next.values())

    def orders(self) -> Orders:
        """The actions of each rank."""
        return tuple(map(tuple, self._rows))

    def _do(self, rank: int, action: Action, now: float) -> None:
        kind, stage, _ = action
        self._rows[rank].append(action)
        self._next[kind, stage] += 1
        self._left[rank] -= kind == "forward"
        self._live[rank] += (kind == "forward") - (kind in ("backward", "weights"))
        self._free_at[rank] = self._ends[action] = now + self.costs[stage].of(kind)

    def _ready(self, rank: int, now: float) -> Iterator[Action]:
        for (kind, stage), n in self._next_of(rank):
            action = Action(kind, stage, n)
            if kind == "forward":
                ready = self._has_room(rank, action) and self._done(kind, stage - 1, n, now)
            elif kind == "weights":
                ready = n < self._next[self._backward, stage]
            else:
                waits = self.rules.phased and self._left[rank]
                ready = not waits and self._done("forward", stage, n, now)
                ready = ready and self._done(kind, stage + 1, n, now)
            if ready:
                yield action

    def _next_of(self, rank: int) -> Iterator[tuple[tuple[Kind, int], int]]:
        for stage in self._own[rank]:
            for kind in self._level:
                number = self._next[kind, stage]
                if number < self.microbatches:
                    yield (kind, stage), number

    def _has_room(self, rank: int, forward: Action) -> bool:
        """True if the limits allow a forward.

        The last room for an activation is for the rank's last stage, unless a microbatch that has
        passed that stage will come back to free another: else the rank might never go on.
        """
        _, stage, number = forward
        first, last = self._own[rank][0], self._own[rank][-1]
        backward = self._next[self._backward, stage]
        returned = self._next[self._backward, first]
        returns = stage == last or self._next["forward", last] > returned
        room = self.rules.live[stage] - self._live[rank] - (not returns)
        return room > 0 and number - backward < self.rules.flight[stage]

    def _done(self, kind: Kind, stage: int, number: int, now: float) -> bool:
        """True if an action is done, or if there is no such stage."""
        outside = not 0 <= stage < len(self.home)
        return outside or self._ends.get(Action(kind, stage, number), now + 1) <= now

    def _urgency(self, action: Action) -> tuple[int, ...]:
        kind, stage, number = action
        late = kind == "weights" and not self._left[self.home[stage]]
        key = self.rules.forward_key if kind == "forward" else self.rules.backward_key
        return (self._level[kind] + 2 * late, *key(number, self._place[stage]))
