"""The proof that ranks which act in given orders never hang, and the order of their messages.

An order is *complete* if each microbatch passes each stage once, forward and backward. It has no
circle if the ranks, each doing the next action as soon as the needs are met, all come to an end;
else some ranks wait for each other, and the error names them.

Messages are numbered in the order in which they are made, and each rank posts a receive before the
rank sends a message with a higher number. Then no engine can hang: neither those that take messages
early, nor those whose sends wait for the receive, nor those that do all sends and receives of a
rank one after the other (NCCL). For let *n* be the first message that does not arrive. The sender
does not wait: all that it sends and receives before has arrived. Nor does the receiver, who posts
the receive before needing any message after *n*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from tilework.parallel.pipelines.actions import (
    LETTERS,
    WHOLE,
    Action,
    ActionStep,
    StageCost,
    StageMessage,
)
from tilework.wait_graph import IN_A_CIRCLE, cycle_through

#: The actions of each rank.
Orders = Sequence[Sequence[Action]]
#: Faults that an error tells.
_MOST = 4


class Timing(NamedTuple):
    """The times of actions if messages take no time."""

    #: For each rank, when each of the rank's actions starts.
    starts: tuple[tuple[float, ...], ...]
    #: When each action ends; actions are in an order that fits all needs.
    ends: dict[Action, float]


class _Wait(NamedTuple):
    """A rank that cannot do an action before a rank has done another action."""

    rank: int
    awaited: tuple[int]
    position: int
    action: Action
    need: Action


def needs(action: Action, every: Container[Action], stages: int) -> Iterator[Action]:
    """The actions whose values ``action`` needs; ``every`` has all actions of all ranks."""
    kind, stage, microbatch = action
    if kind == "forward" and stage:
        yield Action("forward", stage - 1, microbatch)
    if kind == "weights":
        yield Action("input_gradient", stage, microbatch)
    if kind in ("backward", "input_gradient"):
        yield Action("forward", stage, microbatch)
        if stage + 1 < stages:
            whole = Action("backward", stage + 1, microbatch)
            yield whole if whole in every else whole._replace(kind="input_gradient")


def checked_action(action: object) -> Action:
    """An action, or a tuple of the same values, as an action."""
    if not (isinstance(action, tuple) and 2 <= len(action) <= 3):
        raise ValueError(f"got the action {action!r}; expected Action(kind, stage, microbatch)")
    kind, *numbers = action
    if kind not in LETTERS:
        raise ValueError(f"got an action of kind {kind!r}; expected {', '.join(LETTERS)}")
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"got the action {action!r}; expected whole numbers after the kind")
    return Action(kind, *numbers)


def check_complete(orders: Orders, home: Sequence[int], microbatches: int) -> None:
    """Raise ValueError unless each action is there once, on the rank of its stage."""
    for rank, actions in enumerate(orders):
        if not actions:
            raise ValueError(f"rank {rank} has no action: give it a stage, or leave it out")
        for action in actions:
            _check_place(action, rank, home, microbatches)
    found = Counter(action for action in chain(*orders) if action.kind not in WHOLE)
    twice = (f"{action.words} is there {n} times" for action, n in found.items() if n > 1)
    others = (_wrong(s, m, found) for m in range(microbatches) for s in range(len(home)))
    # The first few: a wrong number of a microbatch would make very many.
    wrong = list(islice(chain(twice, chain.from_iterable(others)), _MOST + 1))
    if wrong:
        raise ValueError(
            "each microbatch passes each stage once: forward, and backward or both input_gradient"
            f" and weights; but {'; '.join(wrong[:_MOST])}{' and more' * (len(wrong) > _MOST)}"
        )


def _check_place(action: Action, rank: int, home: Sequence[int], microbatches: int) -> None:
    kind, stage, number = action
    if not 0 <= stage < len(home):
        raise ValueError(f"rank {rank}: got stage {stage}; expected 0 to {len(home) - 1}")
    if home[stage] != rank:
        raise ValueError(
            f"rank {rank}: {action.words}, whose other actions are on rank {home[stage]}: all"
            " actions of a stage are on one rank"
        )
    least, most = (-1, -1) if kind in WHOLE else (0, microbatches - 1)
    if not least <= number <= most:
        expected = f"{least} to {most}" if most > least else f"{least}"
        raise ValueError(
            f"rank {rank}: {kind} in stage {stage}: got microbatch {number}; expected {expected}"
        )


def _wrong(stage: int, microbatch: int, found: Mapping[Action, int]) -> Iterator[str]:
    """The actions of a microbatch in a stage that are missing, or there in two ways, in words."""
    forward, backward, *halves = (
        Action(kind, stage, microbatch)
        for kind in ("forward", "backward", "input_gradient", "weights")
    )
    is_whole = backward in found or found.keys().isdisjoint(halves)
    wanted = (forward, backward) if is_whole else (forward, *halves)
    yield from (f"{action.words} is missing" for action in wanted if action not in found)
    if is_whole:
        yield from (f"{half.words} is there beside backward" for half in halves if half in found)


def check_whole_stages(orders: Orders) -> None:
    """Raise ValueError where parameters are used that are freed, or gradients after "reduce"."""
    for rank, actions in enumerate(orders):
        gathered = {a.stage: False for a in actions if a.kind == "gather"}
        reduced: set[int] = set()
        for position, action in enumerate(actions):
            wrong = _wrong_use(action, gathered.get(action.stage), action.stage in reduced)
            if wrong:
                raise ValueError(f"rank {rank}, action {position}: {action.words}: {wrong}")
            if action.kind in ("gather", "free"):
                gathered[action.stage] = action.kind == "gather"
            elif action.kind == "reduce":
                reduced.add(action.stage)


def _wrong_use(action: Action, gathered: bool | None, reduced: bool) -> str:
    """The fault, in words, if any; ``gathered`` is None if the stage is never gathered."""
    kind = action.kind
    if kind == "gather":
        return "the parameters are gathered already" if gathered else ""
    if reduced and kind in ("reduce", "backward", "weights"):
        return "the gradients are reduced already"
    if not gathered and (kind == "free" or (gathered is False and kind != "reduce")):
        return "the parameters are not gathered"
    return ""


def timing(orders: Orders, home: Sequence[int], costs: Sequence[StageCost]) -> Timing:
    """When each action of complete orders starts and ends.

    Raises:
        ValueError: Ranks wait for each other in a circle, which the error names.
    """
    every = frozenset(chain(*orders))
    starts: list[list[float]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    clock = [0.0] * len(orders)
    #: By action: the ranks that wait for it.
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        for action in orders[rank][len(starts[rank]) :]:
            needed = list(needs(action, every, len(home)))
            missing = next((need for need in needed if need not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            starts[rank].append(max([clock[rank], *(ends[need] for need in needed)]))
            clock[rank] = starts[rank][-1] + costs[action.stage].of(action.kind)
            ends[action] = clock[rank]
            ready += waiting.pop(action, ())
    waits = [
        _Wait(rank, (home[need.stage],), len(starts[rank]), orders[rank][len(starts[rank])], need)
        for need, ranks in waiting.items()
        for rank in ranks
    ]
    if waits:
        raise ValueError(_told(waits))
    return Timing(tuple(map(tuple, starts)), ends)


def _told(waits: Sequence[_Wait]) -> str:
    """The shortest circle among the waits of all ranks that cannot continue, in words."""
    own = {wait.rank: [wait] for wait in waits}
    circle = min(filter(None, (cycle_through(rank, own.get) for rank in sorted(own))), key=len)
    ranks = ", ".join(str(wait.rank) for wait in circle)
    who = f"ranks {ranks} {IN_A_CIRCLE}" if len(circle) > 1 else f"rank {ranks} waits for itself"
    told = [
        f"  rank {wait.rank} waits in action {wait.position}, {wait.action.words}, for rank"
        f" {wait.awaited[0]}, which has not done {wait.need.words}\n"
        for wait in circle
    ]
    return (
        f"{who}, and none can continue:\n{''.join(told)}Move one of these actions behind what it"
        " waits for, or let a maker such as Schedule.gpipe choose the order."
    )


def messages(home: Sequence[int], ends: Mapping[Action, float]) -> tuple[StageMessage, ...]:
    """All messages between ranks, by the time at which they are made.

    ``ends`` as in :class:`Timing`: where times are equal, the order fits the needs.
    """
    place = {action: n for n, action in enumerate(sorted(ends, key=lambda each: ends[each]))}
    pairs = sorted(
        (place[need], need, action)
        for action in ends
        for need in needs(action, ends, len(home))
        if home[need.stage] != home[action.stage]
    )
    return tuple(
        StageMessage(number, made, used, home[made.stage], home[used.stage])
        for number, (_, made, used) in enumerate(pairs)
    )


def steps_of(
    rank: int, actions: Sequence[Action], all_messages: Iterable[StageMessage]
) -> Iterator[ActionStep]:
    """The actions of a rank with the messages around them; receives are posted as late as allowed.

    A receive is posted before the action that needs it, and before the rank sends a message with a
    higher number or posts the receive of a message.
    """
    sends = {each.made_by: each for each in all_messages if each.source == rank}
    takes = {each.used_by: each for each in all_messages if each.target == rank}
    unposted = sorted(takes.values())[::-1]
    for action in actions:
        near = [each for each in (takes.get(action), sends.get(action)) if each]
        posted = []
        while near and unposted and unposted[-1] <= max(near):
            posted.append(unposted.pop())
        yield ActionStep(tuple(posted), takes.get(action), action, sends.get(action))


def sharded(actions: Sequence[Action], held: int) -> Iterator[Action]:
    """A rank's actions, with gathers before uses, frees where room is needed, and reductions.

    Where there is room, a stage is gathered before the action before the first that needs it.
    """
    gathered: list[int] = []
    for at, action in enumerate(actions):
        uses = [each.stage for each in actions[at:]]
        for stage in dict.fromkeys(uses[: min(held, 2)]):
            if stage not in gathered:
                if len(gathered) == held:
                    last_used = max(gathered, key=uses.index)
                    gathered.remove(last_used)
                    yield Action("free", last_used)
                gathered.append(stage)
                yield Action("gather", stage)
        yield action
        if action.stage not in uses[1:]:
            gathered.remove(action.stage)
            yield from (Action("free", action.stage), Action("reduce", action.stage))
