"""The list scheduler: a rank that is free does the most urgent action whose needs are met."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilework.parallel.pipelines.actions import Action, Kind, StageCost
from tilework.parallel.pipelines.proof import Orders, needs

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
            return ("forward", "input_gradient", "weights"), (
                "forward",
                "weights",
                "input_gradient",
            )
        forwards_first: tuple[Kind, ...] = ("forward", "backward")
        return (forwards_first,) if self.phased else (forwards_first, forwards_first[::-1])


def list_orders(
    home: Sequence[int], microbatches: int, rules: Rules, costs: Sequence[StageCost]
) -> list[Orders]:
    """Orders of actions that are worth comparing: one at least, if a microbatch fits the limits.

    Orders for equal costs are among them: where costs differ, these may be better.
    """
    equal = (StageCost(),) * len(home)
    runs = product(rules.urgencies, dict.fromkeys((tuple(costs), equal)))
    tried = [_Scheduler(home, microbatches, rules, kinds, planned) for kinds, planned in runs]
    found: list[Orders] = [each.rows for each in tried if each.run()]
    if not found:
        # Limits may stop all ranks, but not if every microbatch that has begun has room to end.
        few = min(most // home.count(rank) for rank, most in zip(home, rules.live, strict=True))
        rules = replace(rules, flight=[few] * len(home))
        careful = _Scheduler(home, microbatches, rules, rules.urgencies[0], costs)
        careful.run()
        found = [careful.rows]
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
        self.urgency = urgency
        #: The actions of each rank.
        self.rows: list[list[Action]] = [[] for _ in range(max(home) + 1)]
        self._own = [
            [s for s, of in enumerate(home) if of == rank] for rank in range(len(self.rows))
        ]
        self._free_at = [0.0] * len(self.rows)
        self._ends: dict[Action, float] = {}
        #: For each kind and stage the microbatch that is next, which is how many are done.
        self._next = {(kind, stage): 0 for kind in urgency for stage in range(len(home))}
        every = product(self._next, range(microbatches))
        self._every = frozenset(Action(*which, number) for which, number in every)

    def run(self) -> bool:
        """Do all actions; False if limits stopped all ranks."""
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self._free_at[rank]:
                continue
            action = min(self._ready(rank, now), key=self._urgency, default=None)
            if action is None:
                continue
            kind, stage, _ = action
            self.rows[rank].append(action)
            self._next[kind, stage] += 1
            self._free_at[rank] = self._ends[action] = now + self.costs[stage].of(kind)
            for other in set(self.home[max(stage - 1, 0) : stage + 2]):
                heapq.heappush(events, (self._free_at[rank], other))
        return all(number == self.microbatches for number in self._next.values())

    def _ready(self, rank: int, now: float) -> Iterator[Action]:
        for stage, kind in product(self._own[rank], self.urgency):
            action = Action(kind, stage, self._next[kind, stage])
            if action.microbatch < self.microbatches and self._is_allowed(rank, action):
                needed = needs(action, self._every, len(self.home))
                if all(self._ends.get(need, math.inf) <= now for need in needed):
                    yield action

    def _is_allowed(self, rank: int, action: Action) -> bool:
        """True if the rules allow an action.

        The last room for an activation is for the rank's last stage, unless a microbatch that has
        passed that stage will come back to free another: else the rank might never go on.
        """
        kind, stage, number = action
        if kind != "forward":
            return not (self.rules.phased and self._has_forwards(rank))
        own, done = self._own[rank], self._next
        backward: Kind = "input_gradient" if self.rules.split else "backward"
        frees: Kind = "weights" if self.rules.split else "backward"
        live = sum(done["forward", each] - done[frees, each] for each in own)
        returns = stage == own[-1] or done["forward", own[-1]] > done[backward, own[0]]
        room = self.rules.live[stage] - live - (not returns)
        return room > 0 and number - done[backward, stage] < self.rules.flight[stage]

    def _has_forwards(self, rank: int) -> bool:
        return any(self._next["forward", stage] < self.microbatches for stage in self._own[rank])

    def _urgency(self, action: Action) -> tuple[int, ...]:
        kind, stage, number = action
        own = self._own[self.home[stage]]
        late = kind == "weights" and not self._has_forwards(self.home[stage])
        key = self.rules.forward_key if kind == "forward" else self.rules.backward_key
        return (self.urgency.index(kind) + 2 * late, *key(number, own.index(stage)))
