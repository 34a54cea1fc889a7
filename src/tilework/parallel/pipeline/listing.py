"""The list scheduler: each rank does the first ready action by rules, and waits only for needs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilework.parallel.pipeline.actions import Action, Kind, StageCost

#: From the microbatch and the place of a stage among the rank's stages: less is earlier.
Key = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """How ranks choose among actions that are ready.

    Attributes:
        limits: For each stage: a forward starts only while the rank has fewer live activations.
        split: True to cut backward in two.
        first: The kinds, the most urgent first.
        forward_key: The order of forwards of several stages of a rank.
        backward_key: The order of backwards.
        phased: True if backwards of a rank start after all of the rank's forwards.
    """

    limits: Sequence[int]
    split: bool = False
    first: tuple[Kind, ...] = ("backward", "input_gradient", "forward", "weights")
    forward_key: Key = lambda microbatch, place: (-place, microbatch)
    backward_key: Key = lambda microbatch, place: (microbatch, -place)
    phased: bool = False


def list_actions(
    home: Sequence[int], microbatches: int, rules: Rules, costs: Sequence[StageCost]
) -> list[list[Action]]:
    """The actions of each rank, as the rules choose them if the stages cost this much.

    Raises:
        ValueError: The limits are too small for any order.
    """
    scheduler = _Scheduler(home, microbatches, rules, costs)
    scheduler.run()
    return scheduler.orders


class _Scheduler:
    def __init__(
        self, home: Sequence[int], microbatches: int, rules: Rules, costs: Sequence[StageCost]
    ) -> None:
        self.home, self.microbatches, self.rules, self.costs = home, microbatches, rules, costs
        ranks = max(home) + 1
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.own = [[s for s, rank in enumerate(home) if rank == r] for r in range(ranks)]
        self.place = {s: n for own in self.own for n, s in enumerate(own)}
        self.live = [0] * ranks
        self.free_at = [0.0] * ranks
        self.done: dict[Action, float] = {}
        self.backward: Kind = "input_gradient" if rules.split else "backward"
        #: By kind and stage: the number of the next microbatch.
        kinds: tuple[Kind, ...] = ("forward", self.backward, "weights")
        self.next = {(kind, stage): 0 for kind in kinds for stage in range(len(home))}

    def run(self) -> None:
        events = [(0.0, rank) for rank in range(len(self.orders))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.free_at[rank]:
                continue
            ready = min(self._ready(rank, now), key=self._urgency, default=None)
            if ready is None:
                continue
            self._do(rank, ready, now)
            near = range(max(ready.stage - 1, 0), min(ready.stage + 2, len(self.home)))
            for other in {self.home[stage] for stage in near}:
                heapq.heappush(events, (self.free_at[rank], other))
        total = len(self.home) * self.microbatches * (2 + self.rules.split)
        if sum(map(len, self.orders)) < total:
            raise ValueError(
                f"no order of {self.microbatches} microbatches in {len(self.home)} stages keeps to"
                f" at most {list(self.rules.limits)} live activations: allow more"
            )

    def _do(self, rank: int, action: Action, now: float) -> None:
        kind, stage, _ = action
        self.orders[rank].append(action)
        self.next[kind, stage] += 1
        self.live[rank] += (kind == "forward") - (kind in ("backward", "weights"))
        self.free_at[rank] = self.done[action] = now + self.costs[stage].of(kind)

    def _ready(self, rank: int, now: float) -> Iterator[Action]:
        forwards_left = any(self.next["forward", s] < self.microbatches for s in self.own[rank])
        for stage in self.own[rank]:
            n = self.next["forward", stage]
            if n < self.microbatches and self.live[rank] < self.rules.limits[stage]:
                if stage == 0 or self._is_done(Action("forward", stage - 1, n), now):
                    yield Action("forward", stage, n)
            n = self.next[self.backward, stage]
            if n < self.next["forward", stage] and not (self.rules.phased and forwards_left):
                last = stage + 1 == len(self.home)
                if last or self._is_done(Action(self.backward, stage + 1, n), now):
                    yield Action(self.backward, stage, n)
            n = self.next["weights", stage]
            if self.rules.split and n < self.next[self.backward, stage]:
                yield Action("weights", stage, n)

    def _is_done(self, action: Action, now: float) -> bool:
        return self.done.get(action, now + 1) <= now

    def _urgency(self, action: Action) -> tuple[int, ...]:
        kind, stage, microbatch = action
        key = self.rules.forward_key if kind == "forward" else self.rules.backward_key
        return (self.rules.first.index(kind), *key(microbatch, self.place[stage]))
