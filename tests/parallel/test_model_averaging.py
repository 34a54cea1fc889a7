"""Averages of parameters, by period and by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilework.parallel import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)
from tilework.testing import run_ranks


def parameter(rank: int, graded: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.full((2,), float(rank)))
    made.grad = torch.zeros(2) if graded else None
    return made


def test_what_has_no_gradient_stays() -> None:
    def program(rank: int) -> list[float]:
        every = [parameter(rank), parameter(rank, graded=False)]
        average_parameters([{"params": every}])
        return [each[0].item() for each in every]

    assert run_ranks(3, program) == [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]


def test_periods() -> None:
    def program(rank: int) -> list[float]:
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        values = []
        for _ in range(5):
            own = parameter(rank)
            averager.average_parameters([own])
            values.append(own[0].item())
        return values

    assert run_ranks(2, program)[1] == [1.0, 0.5, 1.0, 0.5, 1.0]


def test_groups_within_groups() -> None:
    def program(rank: int) -> list[float]:
        averager = HierarchicalModelAverager({1: 2, 2: 4})
        values = []
        for _ in range(3):
            own = parameter(rank)
            averager.average_parameters([own])
            values.append(own[0].item())
        return values

    assert run_ranks(4, program) == [[1.5, 0.5, 1.5]] * 2 + [[1.5, 2.5, 1.5]] * 2


def test_an_optimizer_that_averages() -> None:
    def program(rank: int) -> tuple[float, int, float]:
        own = parameter(rank)
        averager = PeriodicModelAverager(period=2)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD([own], lr=1.0), averager)
        for _ in range(2):
            own.grad = torch.ones(2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        state = optimizer.state_dict()
        again_averager = PeriodicModelAverager(period=2)
        again = PostLocalSGDOptimizer(torch.optim.SGD([parameter(rank)], lr=0.5), again_averager)
        again.load_state_dict(state)
        return own[0].item(), again_averager.step, again.param_groups[0]["lr"]

    # The first step averages 0 - 1 and 1 - 1, the second does not.
    assert run_ranks(2, program) == [(-1.5, 2, 1.0)] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PeriodicModelAverager(0), "at least 1 step, got 0"),
        (lambda: PeriodicModelAverager(1, -1), "must not be negative, got -1"),
        (lambda: HierarchicalModelAverager({}), "ascending periods"),
        (lambda: HierarchicalModelAverager({2: 1, 3: 2}), "ascending periods"),
        (lambda: HierarchicalModelAverager({1: 1}), "the last of them 2"),
    ],
)
def test_misuse(make: Any, message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            make()

    run_ranks(2, program)
