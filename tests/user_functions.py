"""Functions of autograd as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Squared(torch.autograd.Function):
    """The square; saves what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = 2 * x * grad
        return found
