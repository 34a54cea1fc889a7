"""Backward passes in two programs: gradients of arguments first, then the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilework.capture.modules import CompiledFunction


def recorded(module: Any, x: Tensor) -> CompiledFunction:
    """A function after the two calls that make the programs."""
    function = CompiledFunction(module, "python", cuts=True)
    for _ in range(2):
        torch.autograd.grad(function(x).sum(), x)
    return function


def test_gradients_of_arguments_come_before_those_of_parameters() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, grad = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
    function = recorded(module, x)
    result = function(x)
    call = function.take_last()
    assert call is not None
    ((argument, found),) = call.input_gradients([grad])
    assert argument is x
    assert all(p.grad is None for p in module.parameters())
    result.backward(grad)
    assert x.grad is None
    expected = torch.autograd.grad(module(x), [x, *module.parameters()], grad)
    got = [found, *(p.grad for p in module.parameters())]
    torch.testing.assert_close(got, [*expected], rtol=0, atol=0)


def test_random_draws_stay_in_the_first_half() -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.ones(2, 3)

    def step(x: Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False)

    function = recorded(step, x.requires_grad_())
    ((passes,),) = function._passes.values()
    kinds = [{each.kind for each in part.graph.instructions} for part in passes.parts[1:]]
    assert "draw" in kinds[0]
    assert kinds[1] == {"operator"}


def test_values_that_were_written_to_since_the_first_half_are_refused() -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    function = recorded(module, x)
    result = function(x)
    call = function.take_last()
    assert call is not None
    call.input_gradients([torch.ones(2, 3)])
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_parameters_behind_a_result_without_a_gradient_get_none() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    module, x = Two(), torch.ones(2, 3)
    function = CompiledFunction(module, "python")
    for _ in range(3):
        module.zero_grad()
        function(x)[0].sum().backward()
    assert module.a.weight.grad is not None
    assert module.b.weight.grad is None
