"""Whether an optimizer treats each element on its own, so that it may work on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_STEPS = 3


def check_elementwise(
    optimizer_class: Any, args: Sequence[Any], options: dict[str, Any], device: torch.device
) -> None:
    """Try the optimizer on a small tensor, and on its parts. Local; takes milliseconds.

    Raises:
        TypeError: It is no optimizer class.
        ValueError: The parts do not become the parts of the whole.
        Exception: The optimizer does not take its arguments.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class is a subclass of torch.optim.Optimizer, got {optimizer_class!r}"
        )
    whole = torch.arange(24, dtype=torch.float64, device=device).view(4, 6)

    def make(tensor: Tensor) -> Optimizer:
        return optimizer_class([tensor], *args, **options)

    at_once = _moved_by(make, whole)
    # Each by an optimizer of its own, as on several ranks.
    in_parts = torch.cat([_moved_by(make, part) for part in (whole[:1], whole[1:])])
    if not torch.allclose(at_once, in_parts, rtol=1e-6, atol=1e-9 * float(at_once.abs().max())):
        raise ValueError(
            f"{optimizer_class.__name__} does not treat each element on its own: on shards it "
            f"computes something else than on the whole tensor. Use one that does (SGD, Adam, "
            f"AdamW, Adagrad, RMSprop, …), or full_tensor() and a plain parameter"
        )


def _moved_by(make: Callable[[Tensor], Optimizer], numbers: Tensor) -> Tensor:
    """How far the optimizer moves a parameter; the gradients come from the elements' numbers."""
    parameter = torch.cos(numbers).requires_grad_()
    optimizer = make(parameter)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # one that was to grow from 0 would move nothing

    for step in range(_STEPS):

        def closure(step: int = step) -> Tensor:
            parameter.grad = torch.sin(numbers * (step + 1) + 1) + 0.1 * parameter.detach()
            return parameter.detach().sum()

        closure()
        optimizer.step(closure)  # type: ignore[arg-type]
    return parameter.detach() - torch.cos(numbers)
