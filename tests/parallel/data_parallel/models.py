"""Modules and steps that tests of data parallelism share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks

WIDTH, ROWS = 8, 4
SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
EACH_SETTING = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
#: torch does not annotate ``backward``.
mse: Any = F.mse_loss


def batch(ranks: int, step: int = 0, width: int = WIDTH, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, the same on every rank: (ranks * rows, width) each."""
    generator = torch.Generator().manual_seed(step)
    shape = (ranks * rows, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose parameters are drawn from a generator of this thread, the same each time."""
    module = make()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.uniform_(-0.4, 0.4, generator=generator)
    return module


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)))


def same_gradients(ddp: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    """Assert that a replica's gradients are those of the plain module over all rows."""
    for (name, own), wanted in zip(ddp.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is None:
            assert own.grad is None or not own.grad.any(), name
        else:
            assert own.grad is not None, name
            own_grad = own.grad.to_dense() if own.grad.is_sparse else own.grad
            wanted_grad = wanted.grad.to_dense() if wanted.grad.is_sparse else wanted.grad
            assert_close(own_grad, wanted_grad, **(tolerance or LOOSE))


LOOSE: dict[str, Any] = {"rtol": 1.3e-6, "atol": 1e-6}


def compare_training(
    rank: int,
    ranks: int,
    model: nn.Module,
    *,
    steps: int = 4,
    run: Callable[[nn.Module, Tensor], Any] = lambda model, x: model(x),
    losses: Callable[[Any, Tensor], Tensor] = F.mse_loss,
    tolerance: Any = None,
    **settings: Any,
) -> DistributedDataParallel:
    """Train a replica on its rows beside the plain module on all rows; gradients must be equal."""
    plain: Any = copy.deepcopy(model)
    options = {"bucket_cap_mb": 0.0005, **settings}
    ddp = DistributedDataParallel(copy.deepcopy(model), **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, ddp)]
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(steps):
        x, y = batch(ranks, step)
        for each, rows in ((plain, slice(None)), (ddp, mine)):
            each.zero_grad()
            torch.autograd.backward(losses(run(each, x[rows].requires_grad_()), y[rows]))
        same_gradients(ddp, plain, **(tolerance or {}))
        for optimizer in optimizers:
            optimizer.step()
    return ddp


def gradients(module: nn.Module) -> Sequence[Tensor]:
    """Copies of all gradients."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


class Branches(nn.Module):
    """Two layers, of which inputs choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, right: bool) -> Tensor:
        y: Tensor = self.right(x) if right else self.left(x)
        return y


def raised(ranks: int, program: Callable[[int], Any]) -> list[str]:
    """What each rank raised, as text; "" for none."""

    def guarded(rank: int) -> str:
        try:
            program(rank)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(ranks, guarded)


def train(model: nn.Module, ranks: int = 2, **settings: Any) -> None:
    run_ranks(ranks, lambda rank: compare_training(rank, ranks, model, **settings))
