"""Ranks whose steps part: skipped and doubled passes, lone steps, parameters that part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilework.dtensor import verifying
from tilework.errors import CollectiveMismatchError
from tilework.parallel import DistributedDataParallel
from tilework.parallel.passes import Passes
from tilework.testing import run_ranks

#: Called with the rank, the number of the step, and the parts of a step.
Habit = Callable[[int, int, Callable[[], Any], torch.optim.Optimizer], None]


def _train(habit: Habit, backend: str = "threads", steps: int = 6, **options: bool) -> list[str]:
    """The error of each rank."""

    def program(rank: int) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
        ddp = DistributedDataParallel(model, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        try:
            for step in range(steps):
                habit(rank, step, lambda: ddp(torch.ones(2, 3)).sum(), optimizer)
        except CollectiveMismatchError as error:
            return str(error)
        return ""

    return run_ranks(2, program, backend=backend)


def _ordinary(forward: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    forward().backward()
    optimizer.step()


def _skips_a_backward(
    rank: int, step: int, forward: Callable[[], Any], optimizer: torch.optim.Optimizer
) -> None:
    if rank == 1 and step == 3:
        forward()
    else:
        _ordinary(forward, optimizer)


def _repeats_a_backward(
    rank: int, step: int, forward: Callable[[], Any], optimizer: torch.optim.Optimizer
) -> None:
    if rank == 1 and step == 3:
        forward().backward()
    _ordinary(forward, optimizer)


def _skips_a_step(
    rank: int, step: int, forward: Callable[[], Any], optimizer: torch.optim.Optimizer
) -> None:
    if rank == 1 and step == 3:
        forward().backward()
    else:
        _ordinary(forward, optimizer)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("habit", [_skips_a_backward, _repeats_a_backward, _skips_a_step])
def test_a_rank_whose_steps_shift_raises_on_all_ranks(habit: Habit, backend: str) -> None:
    for error in _train(habit, backend):
        assert "of DistributedDataParallel of Sequential, after forward pass" in error
        assert all(name in error for name in ("rank 0", "rank 1"))


@pytest.mark.parametrize("unused", [False, True])
def test_parameters_that_part_raise_by_name(unused: bool) -> None:
    def habit(
        rank: int, step: int, forward: Callable[[], Any], optimizer: torch.optim.Optimizer
    ) -> None:
        if step == 2 and rank == 1:
            optimizer.param_groups[0]["lr"] = 1.0
        _ordinary(forward, optimizer)

    for error in _train(habit, find_unused_parameters=unused):
        assert "is not the same on all ranks: an element is" in error
        assert "DistributedDataParallel gives all ranks" in error


def test_nothing_is_compared_where_that_is_off() -> None:
    with verifying("off"):
        assert Passes("DistributedDataParallel").digest == 0


def test_passes_compare_parameters_at_bounded_intervals() -> None:
    passes, due = Passes("DistributedDataParallel"), []
    for number in range(1, 100):
        passes.begin_backward([])
        if passes.is_due():
            due.append(number)
    assert due == [1, 2, 3, *range(4, 64, 4), 64, 80, 96]


def test_accumulation_counts_for_one_rank_alone_and_synchronised_passes_do_not() -> None:
    def program(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(2, 1))
        for micro_batches in (1, 3):
            model.zero_grad()
            with model.no_sync():
                for _ in range(micro_batches * rank):
                    model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                for _ in range(rank):
                    model(torch.ones(1, 2))
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, program)
