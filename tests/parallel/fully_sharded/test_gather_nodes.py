"""torch.func's transforms of functions that call a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from tests.parallel.fully_sharded.test_fully_shard_lives import full, shard
from tests.rounding import assert_close
from tilework.testing import run_ranks

# torch.func itself uses torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
Act = Callable[[Any], Any]


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def derivative(f: Act) -> Any:
    result: Any = jvp(f, (X,), (torch.ones_like(X),))
    return result[0] - result[1]


def second_derivative(f: Act) -> Any:
    return derivative(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])


# Ranks as threads share the levels of forward-mode derivatives: these run on one rank.
ONE: list[Act] = [derivative, second_derivative, lambda f: jacfwd(f)(X)]
SEVERAL: list[Act] = [
    lambda f: vmap(lambda row: f(row[None])[0])(X),
    lambda f: grad(lambda x: f(x).square().sum())(X),
    lambda f: jacrev(f)(X),
]


def step(model: Any, act: Act, trains: bool) -> list[Tensor | None]:
    """The result, and the gradients of all parameters."""
    with torch.set_grad_enabled(trains):
        result = act(model)
    if trains:
        (result.square().sum() + model(X).sum()).backward()
    grads = [None if p.grad is None else full(p.grad) for p in model.parameters()]
    return [result.detach(), *grads]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("act", "ranks"), [(act, 1) for act in ONE] + [(act, 2) for act in SEVERAL]
)
def test_transforms(act: Act, ranks: int, trains: bool) -> None:
    wanted = step(layers(), act, trains)
    for got in run_ranks(ranks, lambda rank: step(shard(layers()), act, trains)):
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs) if theirs is not None else None
