"""Actions of a pipeline's ranks, the messages between them, and the costs of stages."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

#: ``backward`` is ``input_gradient`` and ``weights`` in one action.
Kind = Literal[
    "forward", "backward", "input_gradient", "weights", "gather", "free", "reduce"
]  # fmt: skip

#: The letter of each kind in a schedule's text.
LETTERS: Final[dict[Kind, str]] = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "I",
    "weights": "W",
    "gather": "G",
    "free": "X",
    "reduce": "R",
}
#: The kinds that are of a whole stage, not of a microbatch.
WHOLE: Final[frozenset[str]] = frozenset(("gather", "free", "reduce"))


class Action(NamedTuple):
    """Something that a rank does with a stage, and with a microbatch.

    "gather" and "free" are of a stage's sharded parameters, "reduce" is of a stage's gradients;
    these are of no microbatch (-1).
    """

    kind: Kind
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{'' if self.microbatch < 0 else self.microbatch}"

    @property
    def words(self) -> str:
        """The action for a person."""
        of = "" if self.microbatch < 0 else f" of microbatch {self.microbatch}"
        return f"{self.kind.replace('_', ' ')}{of} in stage {self.stage}"


class StageMessage(NamedTuple):
    """An activation, or the gradient of an activation, that goes to the rank that needs it.

    ``number``, the place in the order of all messages of a schedule, can be the tag, since both
    ranks count the same.
    """

    number: int
    made_by: Action
    used_by: Action
    source: int
    target: int


class ActionStep(NamedTuple):
    """An action of a rank, and the messages around it, in this order.

    Some of the ``receives`` that are posted before the action starts are for later actions. The
    message that the action ``takes`` has to be there first; it was posted in this step or before.
    The message that it ``sends`` does not wait for the receiver.
    """

    receives: tuple[StageMessage, ...]
    takes: StageMessage | None
    action: Action
    sends: StageMessage | None


class StageCost(NamedTuple):
    """The times that the actions of a stage take, in any unit, for a microbatch.

    "backward" takes ``input_gradient + weights``.
    """

    forward: float = 1
    input_gradient: float = 1
    weights: float = 1

    def of(self, kind: Kind) -> float:
        """The time of an action; 0 for "gather", "free" and "reduce"."""
        if kind == "backward":
            return self.input_gradient + self.weights
        return 0 if kind in WHOLE else float(getattr(self, kind))
