"""Training a program on one process and on ranks, on a device of any kind."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.programs.kinds import PROGRAMS, Program, Run
from tests.parallel.programs.ways import WAYS
from tests.parallel.sides import Side
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel


@cache
def made(kind: str) -> list[nn.Module]:
    """The models of a program before training."""
    torch.manual_seed(1)
    models = PROGRAMS[kind].make()
    models = models if isinstance(models, list) else [models]
    return [model if kind == "autocast" else model.double() for model in models]


def train(kind: str, program: Program, side: Side) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each step, and the state of the models after the last."""
    wrapped = [side.wrap(copy.deepcopy(model).to(program.device)) for model in made(kind)]
    optimizers = [side.optimizer(model.parameters(), *program.optimizer) for model in wrapped]
    run, losses = Run(wrapped, optimizers, side), []
    for step in range(program.steps):
        batch = program.batch(torch.Generator().manual_seed(step))
        batch = side.share({name: value.to(program.device) for name, value in batch.items()})
        losses.append(side.mean(program.step(run, batch)))
    state = {}
    for number, model in enumerate(wrapped):
        own: Any = model.module if isinstance(model, DistributedDataParallel) else model
        for name, value in own.state_dict().items():
            state[f"{number}.{name}"] = side.whole(value)
    return losses, state


@cache
def plain(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses and the state of one process on the CPU."""
    return train(kind, PROGRAMS[kind], Side())


def fits(kind: str, way: str) -> bool:
    program, kinds = PROGRAMS[kind], WAYS[way].kinds
    is_left_out = way.startswith(program.leaves_out) or (kinds and kind not in kinds)
    return not is_left_out and WAYS[way].fits(program)


def check(kind: str, way: str, device: str = "cpu") -> None:
    """Train on this rank; fail unless all values are those of one process. Collective."""
    losses, state = plain(kind)
    program = replace(PROGRAMS[kind], device=device)
    tolerance: Any = {"rtol": program.tolerance, "atol": program.tolerance}
    found, after = train(kind, program, WAYS[way].side(program))
    for step, (value, wanted) in enumerate(zip(found, losses, strict=True)):
        assert value.device.type == device
        assert_close(value.cpu(), wanted, msg=f"loss of step {step}: {{}}".format, **tolerance)
    assert list(after) == list(state)
    for name, wanted in state.items():
        assert after[name].device.type == device
        assert_close(after[name].cpu(), wanted, msg=f"{name}: {{}}".format, **tolerance)
