"""Passes without reduction beside others: what they accumulate is averaged once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


class Two(nn.Module):
    """Two layers, of which a pass may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y: Tensor = self.a(x) + self.b(x) if both else self.a(x)
        return y


def test_a_parameter_is_replaced_between_accumulation_and_reduction() -> None:
    def program(rank: int) -> list[float]:
        model: Any = DistributedDataParallel(Two(), find_unused_parameters=True)
        model.module.a.weight = nn.Parameter(torch.ones(1, 1))
        x = torch.full((1, 1), 1.0 + rank)
        with model.no_sync():
            model(x).sum().backward()
        (model(x, False) + model(x, False)).sum().backward()
        return [parameter.grad.item() for parameter in model.parameters()]

    assert run_ranks(2, program) == [[4.5, 1.5]] * 2


@pytest.mark.parametrize("views", [False, True])
def test_cleared_gradients_do_not_come_back_as_zeros(views: bool) -> None:
    def program(rank: int) -> bool:
        model: Any = DistributedDataParallel(
            Two(), find_unused_parameters=True, gradient_as_bucket_view=views
        )
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        model.zero_grad()
        model(torch.ones(1, 1), False).sum().backward()
        return model.module.b.weight.grad is None

    assert run_ranks(2, program) == [True, True]


def test_backward_of_an_earlier_forward_pass_reduces() -> None:
    """The forward pass of a graph says whether its backward reduces, not the last one."""

    def program(rank: int) -> float:
        model: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + rank)
        loss = model(x).sum()
        with model.no_sync():
            model(x).sum().backward()
        loss.backward()
        grad: float = model.module.weight.grad.item()
        return grad

    assert run_ranks(2, program) == [3.0, 3.0]


@pytest.mark.parametrize("size", [1, 128])
def test_hooks_that_a_program_adds_run_before_the_reduction(size: int) -> None:
    """Also of gradients that are moved into a bucket one by one."""

    def program(rank: int) -> float:
        model: Any = DistributedDataParallel(nn.Linear(size, size, bias=False))
        weight = model.module.weight

        def scale(parameter: Any) -> None:
            parameter.grad.mul_(2 + rank)

        weight.register_post_accumulate_grad_hook(scale)
        model(torch.ones(1, size)).sum().backward()
        model.zero_grad()
        model(torch.ones(1, size)).sum().backward()
        grad: float = weight.grad[0, 0].item()
        return grad

    assert run_ranks(2, program) == [2.5, 2.5]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_casts_there_and_back_leave_averages(views: bool, to_none: bool) -> None:
    """A cast gives gradients other data, also those that are views of a bucket."""

    def program(rank: int) -> list[float]:
        model: Any = DistributedDataParallel(
            nn.Linear(4, 1, bias=False), gradient_as_bucket_view=views
        )
        grads = []
        for _ in range(3):
            model.zero_grad(set_to_none=to_none)
            model(torch.full((2, 4), 1.0 + rank)).sum().backward()
            grads.append(model.module.weight.grad[0, 0].item())
            model.half().float()
        return grads

    assert run_ranks(2, program) == [[3.0, 3.0, 3.0]] * 2


@pytest.mark.parametrize("views", [False, True])
def test_backward_of_a_forward_pass_before_a_cast_reduces(views: bool) -> None:
    """A cast gives parameters other nodes that accumulate gradients; the graph has the old ones."""

    def program(rank: int) -> float:
        model: Any = DistributedDataParallel(
            nn.Linear(4, 1, bias=False), gradient_as_bucket_view=views
        )
        loss = model(torch.full((2, 4), 1.0 + rank)).sum()
        model.half().float()
        loss.backward()
        grad: float = model.module.weight.grad[0, 0].item()
        return grad

    assert run_ranks(2, program) == [3.0, 3.0]


def test_backward_of_a_forward_pass_before_a_change_of_parameters_reduces() -> None:
    def program(rank: int) -> list[float]:
        model: Any = DistributedDataParallel(Two(), find_unused_parameters=True)
        x = torch.full((1, 1), 1.0 + rank)
        early = model(x, False).sum()
        model.module.b.requires_grad_(False)
        model(x).sum().backward()
        early.backward()
        return [model.module.a.weight.grad.item()]

    assert run_ranks(2, program) == [[3.0]] * 2


def test_what_was_accumulated_before_a_freeze_is_averaged() -> None:
    def program(rank: int) -> float:
        model: Any = DistributedDataParallel(Two(), find_unused_parameters=True)
        x = torch.full((1, 1), 1.0 + rank)
        with model.no_sync():
            model(x, both=rank == 0).sum().backward()
        model.module.b.requires_grad_(False)
        model(x).sum().backward()
        grad: float = model.module.b.weight.grad.item()
        return grad

    assert run_ranks(2, program) == [0.5, 0.5]


def test_accumulated_gradients_are_averaged_where_they_lie() -> None:
    """A gradient from before, or of the program, keeps its memory and its values."""

    def program(rank: int) -> list[bool]:
        model: Any = DistributedDataParallel(nn.Linear(256, 256, bias=False))
        weight, own, x = model.module.weight, torch.zeros(256, 256), torch.ones(1, 256)

        def two_batches(begin: Tensor | None) -> Tensor:
            weight.grad = begin
            with model.no_sync():
                model(x).sum().backward()
            accumulated: Tensor = weight.grad
            model(x).sum().backward()
            return accumulated

        first = two_batches(None)
        inside = first is weight.grad
        left = two_batches(own) is own and two_batches(None) is not first
        return [inside, left, weight.grad is not first, bool((first == 2).all())]

    assert run_ranks(2, program) == [[True] * 4] * 2
