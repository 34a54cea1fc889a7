"""Schedules of pipelines: values, complete and free of circles from construction on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

from tilework.parallel.pipelines import notation, proof
from tilework.parallel.pipelines.actions import (
    WHOLE,
    Action,
    ActionStep,
    Kind,
    StageCost,
    StageMessage,
)
from tilework.parallel.pipelines.listing import Rules, list_orders
from tilework.show import Page, Span, TextTable, count_text, timeline

__all__ = ["Action", "ActionStep", "Kind", "Schedule", "StageCost", "StageMessage"]

#: Times of stages: forward, input gradient, weights.
Costs = Sequence[StageCost | tuple[float, float, float]]
#: The colour of each kind in a picture, and the name.
_COLOURS: dict[str, tuple[str, str]] = {
    "forward": ("#60a5fa", "forward"),
    "backward": ("#34d399", "backward"),
    "input_gradient": ("#34d399", "input gradient"),
    "weights": ("#fbbf24", "weights"),
}


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline, in order.

    A value: equal by content, hashable, printed as a table of ranks x time. Construction proves
    that each microbatch passes each stage once, and that no engine can hang, if ranks post receives
    as :meth:`steps` says.

    Makers take the numbers of ranks, of microbatches and of each rank's stages, and ``costs``: for
    each stage the times of forward, input gradient and weights, in any unit.

    Attributes:
        home: The rank of each stage.
        microbatches: The number of microbatches.
        actions: The actions of each rank, in order.
        costs: The times that the actions of each stage take; 1 for each by default.

    Raises:
        ValueError: An action is missing, is there twice or is on a wrong rank; or ranks would wait
            for each other in a circle, which the error names.

    Example:
        >>> plan = Schedule.one_forward_one_backward(ranks=2, microbatches=3)
        >>> print(plan)
        2 ranks, 2 stages, 3 microbatches: bubble 0.25, live activations 2 1, 6 messages
        time    0   1   2   4   5   6   7   8   10
        rank 0  F0  F1  .   B0  -   F2  B1  -   B2
        rank 1  .   F0  B0  F1  B1  -   F2  B2  .
        >>> plan == Schedule.parse(str(plan))
        True
    """

    home: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    costs: tuple[StageCost, ...] = ()

    def __post_init__(self) -> None:
        _check_count(microbatches=self.microbatches)
        orders = tuple(tuple(map(proof.checked_action, row)) for row in self.actions)
        object.__setattr__(self, "actions", orders)
        object.__setattr__(self, "home", tuple(self.home))
        object.__setattr__(self, "costs", _all_costs(self.costs, len(self.home)))
        proof.check_complete(self.actions, self.home, self.microbatches)
        proof.check_whole_stages(self.actions)
        _ = self.timing  # which raises where ranks wait in a circle

    # -- makers --------------------------------------------------------------------------

    @classmethod
    def gpipe(
        cls, ranks: int, microbatches: int, *, stages_per_rank: int = 1, costs: Costs = ()
    ) -> Schedule:
        """All forwards of a rank come before all backwards. Stage s is on rank ``s % ranks``."""
        home = _loop(ranks, stages_per_rank, microbatches)
        everything = [microbatches * stages_per_rank] * len(home)
        return cls._listed(home, microbatches, Rules(everything, everything, phased=True), costs)

    @classmethod
    def one_forward_one_backward(
        cls, ranks: int, microbatches: int, *, costs: Costs = ()
    ) -> Schedule:
        """Backwards come early, so that rank r has at most ``ranks - r`` live activations (1F1B).

        Each rank has a stage.
        """
        home = _loop(ranks, 1, microbatches)
        limits = range(ranks, 0, -1)
        return cls._listed(home, microbatches, Rules(limits, limits), costs)

    @classmethod
    def interleaved(
        cls, ranks: int, microbatches: int, stages_per_rank: int = 2, *, costs: Costs = ()
    ) -> Schedule:
        """1F1B with several stages on each rank, in turns: stage s is on rank ``s % ranks``.

        Microbatches pass the stages of a rank in rounds of ``ranks``, or a few more so that rounds
        are equal.
        """
        home = _loop(ranks, stages_per_rank, microbatches)
        rounds = max(1, microbatches // ranks)
        most = -(-microbatches // rounds)
        limits = [2 * (ranks - r - 1) + (stages_per_rank - 1) * most + 1 for r in home]
        rules = Rules(
            limits,
            limits,
            forward_key=lambda number, place: (number * rounds // microbatches, place, number),
            backward_key=lambda number, place: (number * rounds // microbatches, -place, number),
        )
        return cls._listed(home, microbatches, rules, costs)

    @classmethod
    def zero_bubble(
        cls,
        ranks: int,
        microbatches: int,
        variant: Literal["H1", "H2"] = "H1",
        *,
        costs: Costs = (),
    ) -> Schedule:
        """1F1B whose backward is cut in two: gradients of weights fill the gaps.

        "H1" has at most ``ranks`` live activations on a rank; "H2" has at most ``2 * ranks - 1``,
        and no bubble if there are as many microbatches.
        """
        if variant not in ("H1", "H2"):
            raise ValueError(f'variant: got {variant!r}; expected "H1" or "H2"')
        home = _loop(ranks, 1, microbatches)
        live = ranks if variant == "H1" else 2 * ranks - 1
        flight = [rest if variant == "H1" else 2 * rest - 1 for rest in range(ranks, 0, -1)]
        return cls._listed(home, microbatches, Rules([live] * ranks, flight, split=True), costs)

    @classmethod
    def v(cls, ranks: int, microbatches: int, *, costs: Costs = ()) -> Schedule:
        """Two stages on each rank, forth and back, and backward cut in two (ZB-V).

        Rank r has stages r and ``2 * ranks - 1 - r``: the loss is where the input is. A rank has
        at most ``2 * ranks`` live activations, and there is no bubble if there are as many
        microbatches.
        """
        home = [*_loop(ranks, 1, microbatches), *reversed(range(ranks))]
        rules = Rules([2 * ranks] * len(home), range(len(home), 0, -1), split=True)
        return cls._listed(home, microbatches, rules, costs)

    @classmethod
    def of_costs(
        cls,
        home: Sequence[int],
        microbatches: int,
        costs: Costs,
        *,
        live: int | Sequence[int] | None = None,
        split: bool = False,
    ) -> Schedule:
        """The schedule that the list scheduler finds for stages that cost this much.

        Args:
            home: The rank of each stage: a loop, a V, or any other.
            microbatches: The number of microbatches.
            costs: The times of each stage.
            live: The most live activations of a rank, or of each rank. By default as many as 1F1B
                would have.
            split: True to cut backward in two.
        """
        _check_home(home)
        _check_count(microbatches=microbatches)
        flight = range(len(home), 0, -1)
        ranks = max(home) + 1
        most = sum(flight) if live is None else live
        limits = most if isinstance(most, Sequence) else [most] * ranks
        if len(limits) != ranks:
            raise ValueError(f"live: got {len(limits)} limits for {ranks} ranks")
        for rank, limit in enumerate(limits):
            _check_count(live=limit)
            if limit < home.count(rank):
                raise ValueError(
                    f"live: got {limit}; expected at least {home.count(rank)}, since a microbatch"
                    f" lives in all {home.count(rank)} stages of rank {rank} at once"
                )
        rules = Rules([limits[rank] for rank in home], flight, split)
        return cls._listed(home, microbatches, rules, costs)

    @classmethod
    def of_actions(
        cls, actions: Sequence[Iterable[Action | tuple[Kind, int, int]]], *, costs: Costs = ()
    ) -> Schedule:
        """The schedule of an order from elsewhere, if legal: each rank's actions, in order."""
        if isinstance(actions, str) or not isinstance(actions, Sequence):
            kind = type(actions).__name__
            raise ValueError(f"actions: got {kind}; expected a sequence of actions for each rank")
        orders = tuple(tuple(proof.checked_action(each) for each in row) for row in actions)
        everything = [action for row in orders for action in row]
        if not everything:
            raise ValueError("actions: got none; expected a sequence of actions for each rank")
        by_stage = {action.stage: rank for rank, row in enumerate(orders) for action in row}
        if sorted(by_stage) != list(range(len(by_stage))):
            raise ValueError(
                f"actions: got stages {', '.join(map(str, sorted(by_stage)))}; expected all numbers"
                " from 0 on"
            )
        home = tuple(by_stage[stage] for stage in range(len(by_stage)))
        microbatches = max(1, *(action.microbatch + 1 for action in everything))
        return cls(home, microbatches, orders, _all_costs(costs, len(home)))

    @classmethod
    def from_torch(cls, order: object, *, costs: Costs = ()) -> Schedule:
        """The schedule in a table of ``torch.distributed.pipelining``, if the order is legal.

        Sends and receives in the table are left out: they follow from the order.

        Args:
            order: A schedule of torch (anything with a ``pipeline_order``); the mapping from rank
                to actions in it; or the path of a file of such actions as comma-separated values.
            costs: As for other makers.

        Raises:
            ValueError: The order is illegal. torch's own table of ``Schedule1F1B`` is, since torch
                runs another one: make the schedule with :meth:`one_forward_one_backward`.

        Example:
            >>> table = {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1B0", "1F1", "1B1"]}
            >>> print(Schedule.from_torch(table).duration)
            9.0
        """
        return cls.of_actions(notation.read_torch(order), costs=costs)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that ``str`` wrote, or that somebody wrote or edited in the same form.

        Args:
            text: Lines "rank N" with the rank's actions: "F0", or "2F0" with the stage where a rank
                has several. Letters are F, B, I (gradient of the input), W (gradients of weights),
                G (gather), X (free), R (reduce); "." and "-" are time that passes.
        """
        rows, costs = notation.read_text(text)
        return cls.of_actions(rows, costs=costs)

    @classmethod
    def _listed(
        cls, home: Sequence[int], microbatches: int, rules: Rules, costs: Costs
    ) -> Schedule:
        """The best of the orders that the list scheduler makes."""
        known = _all_costs(costs, len(home))
        orders = list_orders(home, microbatches, rules, known)
        found = (cls(tuple(home), microbatches, tuple(map(tuple, each)), known) for each in orders)
        return min(found, key=lambda each: (each.duration, each.bubble))

    def with_sharding(self, held: int = 2) -> Schedule:
        """The schedule with gathers, frees and reductions of stages whose parameters are sharded.

        A stage is gathered one action before it is needed, and freed when ``held`` others are
        needed sooner. Gradients are reduced once, after a stage's last backward.

        Args:
            held: The most stages of a rank that are gathered at once.
        """
        _check_count(held=held)
        plain = [[a for a in row if a.kind not in WHOLE] for row in self.actions]
        return replace(self, actions=tuple(tuple(proof.sharded(row, held)) for row in plain))

    # -- what a schedule costs -----------------------------------------------------------

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.home)

    @property
    def duration(self) -> float:
        """The time of one step from the first action to the last, in the unit of the costs."""
        return max(self.timing.ends.values())

    @property
    def bubble(self) -> float:
        """The share of time in which ranks idle, from 0 to 1.

        Of steps that follow each other: a rank that ends early starts the next step early. For one
        step alone, compare the work with :attr:`duration`.
        """
        starts, ends = self.timing
        spans = [
            ends[row[-1]] - first for row, (first, *_) in zip(self.actions, starts, strict=True)
        ]
        work = sum(self.costs[a.stage].of(a.kind) for row in self.actions for a in row)
        whole = max(spans) * self.ranks
        return max(0.0, (whole - work) / whole)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most activations that live at once, each of a stage and microbatch.

        One lives from "forward" to the end of "backward", or of "weights".
        """
        changes = {"forward": 1, "backward": -1, "weights": -1}
        return tuple(max(accumulate(changes.get(a.kind, 0) for a in row)) for row in self.actions)

    @cached_property
    def timing(self) -> proof.Timing:
        """When actions start and end if messages take no time, in the unit of the costs."""
        return proof.timing(self.actions, self.home, self.costs)

    # -- messages ------------------------------------------------------------------------

    @cached_property
    def messages(self) -> tuple[StageMessage, ...]:
        """All messages between ranks; the place here is the message's number."""
        return proof.messages(self.home, self.timing.ends)

    @cached_property
    def _steps(self) -> tuple[tuple[ActionStep, ...], ...]:
        rows = enumerate(self.actions)
        return tuple(tuple(proof.steps_of(rank, row, self.messages)) for rank, row in rows)

    def steps(self, rank: int) -> tuple[ActionStep, ...]:
        """The actions of a rank, each with the receives to post before it and the send after it.

        A rank that starts sends and receives in this order, and waits for none but what a step
        ``takes``, cannot hang on any engine.
        """
        if rank not in range(self.ranks):
            raise ValueError(f"rank: got {rank}; expected 0 to {self.ranks - 1}")
        return self._steps[rank]

    @cached_property
    def lookahead(self) -> tuple[int, ...]:
        """For each rank how many actions at most a receive is posted ahead of the step that takes
        the message.
        """
        return tuple(max(_posted_ahead(steps), default=0) for steps in self._steps)

    # -- text and pictures ---------------------------------------------------------------

    def __str__(self) -> str:
        live = " ".join(map(str, self.peak_activations))
        headline = (
            f"{count_text(self.ranks, 'rank')}, {count_text(self.stages, 'stage')},"
            f" {self.microbatches:,} microbatch{'es' * (self.microbatches > 1)}:"
            f" bubble {self.bubble:.3g}, live activations {live},"
            f" {count_text(len(self.messages), 'message')}"
        )
        spent = "; ".join(" ".join(f"{time!r}" for time in cost) for cost in self.costs)
        plain = all(cost == StageCost() for cost in self.costs)
        times = sorted(set(chain(*self.timing.starts)))
        rows = [[f"rank {rank}", *self._cells(rank, times)] for rank in range(self.ranks)]
        table = TextTable(["time", *(f"{time:g}" for time in times)], rows)
        return str(Page(headline, *([] if plain else [f"{notation.COSTS} {spent}"]), table))

    def _cells(self, rank: int, times: Sequence[float]) -> Iterator[str]:
        """For each time the actions of a rank that start; "-" while the last goes on, else "."."""
        # Stages are named unless rank r has stage r alone.
        named = self.home != tuple(range(self.ranks))
        starting: dict[float, list[Action]] = {}
        for action, start in zip(self.actions[rank], self.timing.starts[rank], strict=True):
            starting.setdefault(start, []).append(action)
        end = 0.0
        for time in times:
            here = starting.get(time, [])
            if here:
                end = time + self.costs[here[-1].stage].of(here[-1].kind)
            texts = (str(a) if named else str(a).removeprefix(str(a.stage)) for a in here)
            yield "+".join(texts) or ("-" if time < end else ".")

    def _repr_html_(self) -> str:
        return self._picture(inherits=True)

    def timeline(self, path: str | Path) -> None:
        """Write a picture of the schedule, ranks x time, as SVG to a file."""
        Path(path).write_text(self._picture())

    def _picture(self, inherits: bool = False) -> str:
        live = max(self.peak_activations)
        headline = f"bubble {self.bubble:.3g}, at most {live} live activations"
        rows = []
        for rank, (row, starts) in enumerate(zip(self.actions, self.timing.starts, strict=True)):
            times = [self.costs[a.stage].of(a.kind) for a in row]
            spans = [
                Span(start, start + time, a.kind, a.words, str(a.microbatch))
                for a, start, time in zip(row, starts, times, strict=True)
                if time
            ]
            rows.append((f"rank {rank}", spans))
        used = {a.kind for a in chain(*self.actions)}
        kinds: dict[str, tuple[str, str]] = {
            kind: look for kind, look in _COLOURS.items() if kind in used
        }
        return timeline(headline, rows, kinds, inherits, unit="")


def _posted_ahead(steps: Sequence[ActionStep]) -> Iterator[int]:
    """For each message how many actions ahead the receive is posted."""
    posted = {message: at for at, step in enumerate(steps) for message in step.receives}
    return (at - posted[step.takes] for at, step in enumerate(steps) if step.takes)


def _loop(ranks: int, stages_per_rank: int, microbatches: int) -> list[int]:
    _check_count(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches)
    return list(range(ranks)) * stages_per_rank


def _check_count(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: got {value!r}; expected a whole number from 1 on")


def _all_costs(costs: Costs, stages: int) -> tuple[StageCost, ...]:
    """The costs of all stages, after checks; 1 for each action if there are none."""
    try:
        known = tuple(StageCost(*map(float, each)) for each in costs)
    except (TypeError, ValueError):
        known = (StageCost(math.nan),)
    times = [time for cost in known for time in cost]
    if times and not (all(0 <= time < math.inf for time in times) and sum(times) > 0):
        raise ValueError(
            f"costs: got {costs!r}; expected for each stage the times of forward, input gradient"
            " and weights: finite, none below 0, some above"
        )
    if known and len(known) != stages:
        raise ValueError(f"costs: got those of {len(known)} stages; expected {stages}")
    return known or (StageCost(),) * stages


def _check_home(home: Sequence[int]) -> None:
    ranks = set(home)
    if not ranks or not all(isinstance(r, int) for r in home) or ranks != set(range(len(ranks))):
        raise ValueError(
            f"home: got {list(home)}; expected the rank of each stage, and a stage for each rank"
        )
