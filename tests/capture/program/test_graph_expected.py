"""Values on which Python branches: another value undoes the call, and takes another record."""

from __future__ import annotations

import math
import warnings
from math import exp, isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.twins import run_twins, tensors_of


def branch(x: Tensor) -> Tensor:
    return x if x.sum().item() > 0 else -x


def loop(x: Tensor) -> Tensor:
    while x.sum() > 1:
        x = x / 2
    return x


def exponential(x: Tensor) -> Tensor:
    return x * exp(x.sum().item())


def finite(x: Tensor) -> Tensor:
    return x if isfinite(x.sum().item()) else -x


@pytest.mark.parametrize(
    "step",
    [
        branch,
        loop,
        finite,
        exponential,
        lambda x: x[x > 0].sum(),
        lambda x: x[x.argmax().item()],
        lambda x: x if x.sum().item().is_integer() else -x,
        lambda x: x * math.sqrt(abs(x.sum().item())) + round(x.sum().item(), 1),
        lambda x: x * int(x.sum().item()) + x.sum().item() // 2,
    ],
)
def test_a_value_that_takes_another_branch_takes_another_record(step: Any) -> None:
    values = [[1.0, 2.0, 0.5], [1.0, 2.0, 0.5], [-1.0, 2.0, -3.5], [1.0, 9.5, 1.0]] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_twins(lambda: (step, dict), [(torch.tensor(x),) for x in values])


def test_a_branch_of_a_step_that_has_written_undoes_the_call() -> None:
    def make() -> Any:
        model, total = nn.Linear(4, 4), torch.zeros(1)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> Tensor:
            noisy = total.add_(x.sum()) + torch.rand(1)
            loss: Tensor = model(x).square().mean() * noisy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if not math.isfinite(loss.item()):  # a step that is left out
                return loss.detach()
            optimizer.step()
            return loss.detach()

        return step, lambda: {**tensors_of(model, optimizer)(), "total": total}

    batches = [(torch.randn(2, 4),) for _ in range(10)]
    batches[4] = batches[7] = (torch.full((2, 4), math.inf),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = run_twins(make, batches)
    assert len(program.records) == 2
