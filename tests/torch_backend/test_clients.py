"""Programs of tests/clients that need nothing beyond the extra dev: the values are those of Gloo.

``make clients`` runs the others, in an environment of their own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.jobs import Launcher, Rank


def trainer(rank: Rank) -> Any:
    os.environ.update(RANK=str(rank.number), WORLD_SIZE=str(rank.size), HF_HUB_OFFLINE="1")
    os.environ.update(LOCAL_RANK=str(rank.number), LOCAL_WORLD_SIZE=str(rank.size))
    from accelerate import state

    from tests.clients.transformers_trainer import train

    seen = train()
    for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
        kind._reset_state()
    return seen


def pipelines(rank: Rank) -> Any:
    from tests.clients.pipelines import train

    return train()


@pytest.mark.parametrize("program", [trainer, pipelines])
def test_values_are_those_of_gloo(program: Any, ranks: Launcher) -> None:
    if program is trainer:
        pytest.importorskip("transformers", reason="it is in the extra dev")
    for by_backend in ranks(2, Rank.on_both, program):
        assert by_backend["gloo"] == by_backend["tilework"]
        assert by_backend["gloo"]
