"""Schedules of pipelines: values, complete and free of circles from construction on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilework.parallel.pipeline import proof
from tilework.parallel.pipeline.actions import Action, Message, StageCost, Step
from tilework.parallel.pipeline.listing import Rules, list_actions

__all__ = ["Action", "Message", "Schedule", "StageCost", "Step"]


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in which order.

    Equal by content, hashable, printed as ranks x time. Making one proves that the order is
    complete and that no engine can hang in it.

    Attributes:
        home: The rank of each stage.
        microbatches: The number of microbatches.
        actions: The actions of each rank, in order.
        costs: What each stage costs, which times and bubble are computed from.

    Raises:
        ValueError: An action is missing, is there twice or on the wrong rank, or ranks would wait
            for each other in a circle, which the error names.
    """

    home: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    costs: tuple[StageCost, ...]

    def __post_init__(self) -> None:
        proof.check_complete(self.actions, self.home, self.microbatches)
        proof.check_stage_wide(self.actions)
        self._timing  # noqa: B018  # raises where ranks wait in a circle

    # -- makers --------------------------------------------------------------------------

    @classmethod
    def gpipe(cls, ranks: int, microbatches: int, *, costs: Sequence[StageCost] = ()) -> Schedule:
        """All forwards of a rank before all backwards."""
        return cls._listed(
            range(ranks), microbatches, Rules([microbatches] * ranks, phased=True), costs
        )

    @classmethod
    def one_forward_one_backward(
        cls, ranks: int, microbatches: int, *, costs: Sequence[StageCost] = ()
    ) -> Schedule:
        """Backwards as early as possible: rank r has at most ``ranks - r`` live activations."""
        return cls._listed(range(ranks), microbatches, Rules(range(ranks, 0, -1)), costs)

    @classmethod
    def interleaved(
        cls,
        ranks: int,
        microbatches: int,
        stages_per_rank: int = 2,
        *,
        costs: Sequence[StageCost] = (),
    ) -> Schedule:
        """Several stages on each rank, in turns: stage s is on rank ``s % ranks``."""
        home = list(range(ranks)) * stages_per_rank
        limits = [(ranks - r - 1) * 2 + (stages_per_rank - 1) * ranks + 1 for r in home]
        rules = Rules(
            limits,
            forward_key=lambda m, place: (m // ranks, place, m),
            backward_key=lambda m, place: (m // ranks, -place, m),
        )
        return cls._listed(home, microbatches, rules, costs)

    @classmethod
    def zero_bubble(
        cls,
        ranks: int,
        microbatches: int,
        variant: Literal["H1", "H2"] = "H1",
        *,
        costs: Sequence[StageCost] = (),
    ) -> Schedule:
        """Backward in two halves, of which the second fills the gaps."""
        limit = ranks if variant == "H1" else 2 * ranks - 1
        return cls._listed(range(ranks), microbatches, Rules([limit] * ranks, split=True), costs)

    @classmethod
    def v(cls, ranks: int, microbatches: int, *, costs: Sequence[StageCost] = ()) -> Schedule:
        """Two stages on each rank, forth and back, with backward in two halves (ZB-V)."""
        home = [*range(ranks), *reversed(range(ranks))]
        limits = [2 * ranks - 1] * ranks + [2 * ranks] * ranks
        return cls._listed(home, microbatches, Rules(limits, split=True), costs)

    @classmethod
    def of_actions(
        cls, actions: Sequence[Sequence[Action]], *, costs: Sequence[StageCost] = ()
    ) -> Schedule:
        """A schedule of any order: the actions of each rank."""
        home = {a.stage: rank for rank, row in enumerate(actions) for a in row}
        microbatches = 1 + max(a.microbatch for row in actions for a in row)
        homes = tuple(home[stage] for stage in sorted(home))
        return cls(
            homes,
            microbatches,
            tuple(map(tuple, actions)),
            tuple(costs or [StageCost()] * len(homes)),
        )

    @classmethod
    def _listed(
        cls, home: Sequence[int], microbatches: int, rules: Rules, costs: Sequence[StageCost]
    ) -> Schedule:
        all_costs = tuple(costs) or (StageCost(),) * len(home)
        orders = list_actions(home, microbatches, rules, all_costs)
        return cls(tuple(home), microbatches, tuple(map(tuple, orders)), all_costs)

    # -- what a schedule costs -----------------------------------------------------------

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.home)

    @cached_property
    def _timing(self) -> proof.Timing:
        return proof.timing(self.actions, self.home, self.costs)

    @property
    def duration(self) -> float:
        """The time of one step, from the first action to the last, in the unit of the costs."""
        return max(self._timing.ends.values())

    @property
    def bubble(self) -> float:
        """The share of time that ranks idle, from 0 to 1, in steps that follow each other."""
        spans = [
            starts[-1] + self._cost(actions[-1]) - starts[0]
            for starts, actions in zip(self._timing.starts, self.actions, strict=True)
            if actions
        ]
        work = sum(self._cost(action) for actions in self.actions for action in actions)
        return 1 - work / (max(spans) * self.ranks)

    def _cost(self, action: Action) -> float:
        return self.costs[action.stage].of(action.kind)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the largest number of activations that live at once.

        An activation is of one stage and microbatch; it lives from "forward" to the end of
        "backward", or of "weights".
        """
        return tuple(map(_peak, self.actions))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages between ranks; a message's number is the place here."""
        return proof.messages(self.actions, self.home, self._timing.ends)

    @cached_property
    def lookahead(self) -> tuple[int, ...]:
        """For each rank: how many actions at most a receive is posted ahead of the action that
        needs the message, so that the rank cannot hang where sends wait for their receives.
        """
        return tuple(map(_lookahead, self._steps))

    @cached_property
    def _steps(self) -> tuple[tuple[Step, ...], ...]:
        return tuple(
            tuple(proof.steps_of(rank, actions, self.messages))
            for rank, actions in enumerate(self.actions)
        )

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The actions of a rank, each with the receives to post before, and the send after."""
        return self._steps[rank]


def _peak(actions: Sequence[Action]) -> int:
    live = most = 0
    for action in actions:
        live += (action.kind == "forward") - (action.kind in ("backward", "weights"))
        most = max(most, live)
    return most


def _lookahead(steps: Sequence[Step]) -> int:
    posted = {message: at for at, step in enumerate(steps) for message in step.receives}
    return max((at - posted[s.takes] for at, s in enumerate(steps) if s.takes), default=0)
