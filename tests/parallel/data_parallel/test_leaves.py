"""Gradients of a dtype that is not the parameter's (``grad_dtype``) are reduced in that dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch before 2.9")
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Wrap = Callable[[Any], Any]


class Product(torch.autograd.Function):
    """The product with a bfloat16 weight, which gets a float32 gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0].t() @ ctx.saved_tensors[0]


class Layer(nn.Module):
    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.bfloat16))
        self.weight.grad_dtype = dtype
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Any:
        return Product.apply(x, self.weight) + self.bias  # type: ignore[no-untyped-call]


def gradient(model: Any, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    weight, bias = model.parameters()
    assert bias.grad.dtype == torch.bfloat16
    grad: Tensor = weight.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def both(rank: int, wrap: Wrap, act: Callable[[Any], None]) -> None:
    model, wanted = wrap(Layer()), gradient(Layer(), ROWS)
    act(model)
    for _ in range(2):
        found = gradient(model, ROWS[rank * 4 : rank * 4 + 4])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_it_is_kept(wrap: Wrap) -> None:
    run_ranks(2, lambda rank: both(rank, wrap, lambda model: None))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_it_is_noticed_between_steps(wrap: Wrap) -> None:
    def act(model: Any) -> None:
        weight = next(iter(model.parameters()))
        weight.grad_dtype = torch.bfloat16
        assert gradient(model, ROWS).dtype == torch.bfloat16
        model.zero_grad()
        weight.grad_dtype = torch.float32

    run_ranks(2, lambda rank: both(rank, wrap, act))


def test_it_is_kept_by_a_parameter_that_is_assigned() -> None:
    def act(model: Any) -> None:
        model.weight = Layer().weight

    run_ranks(2, lambda rank: both(rank, fully_shard, act))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_gradients_of_any_dtype_are_refused(wrap: Wrap) -> None:
    with pytest.raises(ValueError, match="grad_dtype None"):
        run_ranks(2, lambda rank: wrap(Layer(None)))
