"""What a life may meet instead of the plain model's values: clear refusals, and nothing else.

Each is a row of the table in docs/how-to/data-parallel.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """An error that is a right answer.

    Attributes:
        name: What is refused.
        error: The name of its class.
        text: What its message has: a regular expression.
        after: What an act until then has: likewise.
    """

    name: str
    error: str
    text: str
    after: str = ""


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "DistributedDataParallel without find_unused_parameters, and a parameter left out",
        "RuntimeError",
        "find_unused_parameters=True",
    ),
    Refusal(
        "modules given to fully_shard that only some ranks run",
        "CollectiveMismatchError",
        "ranks called different things|wait for each other in a circle",
        r"routes=\((\d), (?!\1)",
    ),
    Refusal(
        "a weight shared by modules of several calls of fully_shard",
        "ValueError",
        "which was given to fully_shard in another call",
        r"tie\(",
    ),
    Refusal(
        "an optimizer of parameters that were replaced since",
        "RuntimeError",
        "would change what the model does not have",
        r"(replace|load_weights|tie|parametrize|drop_bias)\(",
    ),
    Refusal(
        "the saved state of an optimizer of parameters that were replaced since",
        "CheckpointError",
        r"lacks optimizer\.state",
        r"replace\(.*renew=False",
    ),
    Refusal(
        "a plain parameter where tensor parallelism had sharded",
        "ValueError",
        "was replaced by a plain tensor",
        r"replace\(|load_weights\(assign=True",
    ),
    Refusal(
        "hooks of a parameter that fully_shard has not sharded yet",
        "ValueError",
        "has hooks, which would be lost",
        r"hook\(",
    ),
    Refusal(
        "parametrizations of a module that unshard() has gathered",
        "AssertionError",
        "already has an attribute named",
        r"gather_by_hand\(",
    ),
    Refusal(
        "ties of a module that unshard() has gathered",
        "TypeError",
        "cannot assign .* as parameter",
        r"gather_by_hand\(",
    ),
    Refusal(
        "backward after a step of ZeroRedundancyOptimizer, which writes to all parameters",
        "RuntimeError",
        "modified by an inplace operation",
        "step",
    ),
    Refusal(
        "backward through fully_shard after a step",
        "RuntimeError",
        "was written to in place after the forward pass",
        "step|train|load|parametrize",
    ),
    Refusal(
        "backward through fully_shard after a cast",
        "RuntimeError",
        "after the forward pass whose backward needs it",
        r"cast\(",
    ),
    Refusal(
        "backward(inputs=...), which reaches all parameters of a call of fully_shard",
        "RuntimeError",
        "use_reentrant=True|different number of tensors was saved|graph a second time",
        r"backward_of_some\(",
    ),
    Refusal(
        "reentrant checkpoints in DistributedDataParallel without static_graph=True",
        "RuntimeError",
        "came twice in one backward pass",
        "reentrant",
    ),
)


def refusal(error: BaseException, acts: Sequence[str]) -> str | None:
    """The name of the refusal that an error is, after these acts; None: it is none."""
    names = {cls.__name__ for cls in type(error).__mro__}
    for each in REFUSALS:
        is_after = any(re.search(each.after, act) for act in acts)
        if each.error in names and re.search(each.text, str(error)) and is_after:
            return each.name
    return None
