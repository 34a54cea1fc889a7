"""Random orders of actions, and what they need, written a second time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

from tilework.parallel.pipelines.schedule import Action, Kind, Schedule, StageMessage

Rows = Sequence[Sequence[Action]]


def random_case(seed: int, split: bool) -> tuple[random.Random, list[int], list[Action]]:
    """Random homes of stages, and the actions of a few microbatches in an order without ranks.

    With ``split``, the backwards of some microbatches are cut in two.
    """
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    home = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(home)
    actions = []
    for microbatch in range(rng.randint(1, 4)):
        halves = split and rng.random() < 0.5
        kinds: tuple[Kind, ...] = ("input_gradient", "weights") if halves else ("backward",)
        for stage in range(len(home)):
            actions += [Action(kind, stage, microbatch) for kind in ("forward", *kinds)]
    return rng, home, actions


def before(action: Action, stages: int) -> Iterator[Action]:
    """What an action needs, whether the kinds are there or not."""
    kind, stage, microbatch = action
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, microbatch)
    elif kind == "weights":
        yield Action("input_gradient", stage, microbatch)
    else:
        yield Action("forward", stage, microbatch)
        if stage + 1 < stages:
            yield Action(kind, stage + 1, microbatch)


def legal_rows(seed: int, split: bool = True) -> list[list[Action]]:
    """The actions of each rank, in the order of a random run."""
    rng, home, actions = random_case(seed, split)
    rows: list[list[Action]] = [[] for _ in range(max(home) + 1)]
    done: set[Action] = set()
    while len(done) < len(actions):
        ready = [a for a in actions if a not in done and done.issuperset(before(a, len(home)))]
        action = rng.choice(ready)
        rows[home[action.stage]].append(action)
        done.add(action)
    return rows


def ends_on_a_strict_engine(schedule: Schedule) -> bool:
    """True if all ranks come to their end on the strictest engine.

    A rank's sends and receives are done one after the other. A message moves if both ends have come
    to it. A rank waits for each of its sends.
    """
    queues: list[deque[StageMessage]] = [deque() for _ in schedule.actions]
    programs = [deque(_calls(schedule, rank)) for rank in range(schedule.ranks)]
    moved: set[StageMessage] = set()
    going = True
    while going:
        going = False
        for rank, program in enumerate(programs):
            while program and (program[0][0] == "post" or program[0][1] in moved):
                call, message = program.popleft()
                if call == "post":
                    queues[rank].append(message)
                going = True
            head = queues[rank][0] if queues[rank] else None
            if head and all(queues[r] and queues[r][0] == head for r in (head.source, head.target)):
                queues[head.source].popleft()
                queues[head.target].popleft()
                moved.add(head)
                going = True
    return not any(programs)


def _calls(schedule: Schedule, rank: int) -> Iterator[tuple[str, StageMessage]]:
    for step in schedule.steps(rank):
        yield from (("post", message) for message in step.receives)
        if step.takes is not None:
            yield "wait", step.takes
        if step.sends is not None:
            yield "post", step.sends
            yield "wait", step.sends
