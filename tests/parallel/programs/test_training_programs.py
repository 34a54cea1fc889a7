"""Training programs of many kinds, in each way that fits, have the losses of one process."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.programs.kinds import PROGRAMS, Run
from tests.parallel.programs.ways import WAYS
from tests.parallel.sides import Side
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


@cache
def made(kind: str) -> list[nn.Module]:
    """The models of a program before training."""
    torch.manual_seed(1)
    models = PROGRAMS[kind].make()
    models = models if isinstance(models, list) else [models]
    return [model if kind == "autocast" else model.double() for model in models]


def train(kind: str, side: Side) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each step, and the state of the models after the last."""
    program = PROGRAMS[kind]
    wrapped = [side.wrap(copy.deepcopy(model)) for model in made(kind)]
    optimizers = [side.optimizer(model.parameters(), *program.optimizer) for model in wrapped]
    run, losses = Run(wrapped, optimizers, side), []
    for step in range(program.steps):
        batch = side.share(program.batch(torch.Generator().manual_seed(step)))
        losses.append(side.mean(program.step(run, batch)))
    state = {}
    for number, model in enumerate(wrapped):
        own: Any = model.module if isinstance(model, DistributedDataParallel) else model
        for name, value in own.state_dict().items():
            state[f"{number}.{name}"] = side.whole(value)
    return losses, state


@cache
def plain(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    return train(kind, Side())


def pairs() -> list[tuple[str, str]]:
    return [(kind, way) for kind in PROGRAMS for way in WAYS if fits(kind, way)]


def fits(kind: str, way: str) -> bool:
    program, kinds = PROGRAMS[kind], WAYS[way].kinds
    is_left_out = way.startswith(program.leaves_out) or (kinds and kind not in kinds)
    return not is_left_out and WAYS[way].fits(program)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "way"), pairs())
def test_losses_and_parameters_are_those_of_one_process(kind: str, way: str) -> None:
    losses, state = plain(kind)
    tolerance: Any = {"rtol": PROGRAMS[kind].tolerance, "atol": PROGRAMS[kind].tolerance}

    def program(rank: int) -> None:
        found, after = train(kind, WAYS[way].side(PROGRAMS[kind]))
        for step, (value, wanted) in enumerate(zip(found, losses, strict=True)):
            assert_close(
                value,
                wanted,
                msg=f"loss of step {step}: {{}}".format,
                **tolerance,
            )
        assert list(after) == list(state)
        for name, wanted in state.items():
            assert_close(after[name], wanted, msg=f"{name}: {{}}".format, **tolerance)

    run_ranks(WAYS[way].ranks, program)
