"""Backward passes and steps of sharded parameters: what one rank does otherwise is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.sharded_values import spread
from tilework.dtensor import Shard, init_device_mesh, verify
from tilework.errors import CollectiveMismatchError
from tilework.testing import run_ranks

STEPS, AT = 4, 2
X = torch.arange(12.0).view(4, 3) / 8


class Twice(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Once(Twice):
    """The identity."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1


class Loop:
    """A training loop, of which one rank's may be another."""

    def __init__(self, model: Any, makes: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = model
        self.weight = model.weight
        self.optimizer = makes(model.parameters())
        self.clears = True
        self.function: Any = Once
        self.saved: Any = None

    def run(self, deviate: Callable[[Loop], object]) -> list[float]:
        for number in range(STEPS):
            if number == AT - 1:
                self.saved = self.optimizer.state_dict()
                self.saved["state"] = {
                    key: {name: copied(value) for name, value in state.items()}
                    for key, state in self.saved["state"].items()
                }
            if number == AT:
                deviate(self)
            if self.clears or number != AT:
                self.optimizer.zero_grad()
            self.function.apply(self.model(X)).square().sum().backward()
            self.optimizer.step()
        verify(self.model)
        weight: Any = self.weight
        return [float(each) for each in weight.full_tensor().detach().view(-1)]


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def keep_gradients(loop: Loop) -> None:
    loop.clears = False


def own_function(loop: Loop) -> None:
    loop.function = Twice


def doubled(grad: Tensor) -> None:
    grad.mul_(2)


def first_state(loop: Loop) -> Any:
    state = loop.optimizer.state[loop.weight]
    return state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]


def first_count(loop: Loop) -> Any:
    state = loop.optimizer.state[loop.weight]
    return state.get("step", first_state(loop))


DEVIATIONS: dict[str, Callable[[Loop], object]] = {
    "gradients that are not cleared": keep_gradients,
    "a hook": lambda loop: loop.weight.register_hook(lambda grad: grad * 2),
    "a hook that writes": lambda loop: loop.weight.register_hook(doubled),
    "a function of its own": own_function,
    "a state that is written to": lambda loop: first_state(loop).zero_(),
    "a count of steps that is written to": lambda loop: first_count(loop).add_(3),
    "states that are forgotten": lambda loop: loop.optimizer.state.clear(),
    "states of before": lambda loop: loop.optimizer.load_state_dict(loop.saved),
}
LOOKS: dict[str, Callable[[Loop], object]] = {
    "at gradients": lambda loop: loop.weight.grad.to_local().norm(),
    "at gradients that are printed": lambda loop: repr(loop.weight.grad),
    "at states": lambda loop: [repr(each) for each in loop.optimizer.state[loop.weight].values()],
    "at gradients in a hook": lambda loop: loop.weight.register_hook(lambda grad: None),
    "at copies": lambda loop: loop.optimizer.state_dict(),
    "at options of its own": lambda loop: loop.optimizer.param_groups[0].update(log_step=17),
    "at how it is computed": lambda loop: loop.optimizer.param_groups[0].update(foreach=False),
    "at nothing, and clears twice": lambda loop: loop.optimizer.zero_grad(),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
}


def outcomes(name: str, deviate: Callable[[Loop], object]) -> list[Any]:
    """The weights of each rank, or its error, where rank 1 deviates."""

    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model = spread(nn.Linear(3, 4), mesh, {"weight": [Shard(0)], "bias": [Shard(0)]})
        try:
            return Loop(model, OPTIMIZERS[name]).run(deviate if rank == 1 else lambda loop: None)
        except CollectiveMismatchError as error:
            return error

    return run_ranks(2, program)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("what", DEVIATIONS)
def test_one_rank_that_deviates(what: str, name: str) -> None:
    found = outcomes(name, DEVIATIONS[what])
    assert all(isinstance(each, CollectiveMismatchError) for each in found), found


@pytest.mark.parametrize("what", LOOKS)
def test_one_rank_that_looks(what: str) -> None:
    found = outcomes("SGD", LOOKS[what])
    assert isinstance(found[0], list), found
    assert found[0] == found[1]
