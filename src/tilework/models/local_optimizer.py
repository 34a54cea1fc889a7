"""Optimizers that step on local tensors: which are suitable, and which states have elements.

An elementwise optimizer changes each element of a parameter depending only on that element's
gradient and states. A step on local tensors is therefore a step on the whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

#: Known to be elementwise with any options. Exactly these: a subclass may do other things.
ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.ASGD),
    }
)
_TRIAL_STEPS = 3


def is_per_element(name: str, state: object, local: Tensor) -> bool:
    """True if this state of a local tensor has an element for each element of the tensor."""
    # The number of steps has no dims, but a parameter may have none either.
    return isinstance(state, Tensor) and state.shape == local.shape and name != "step"


def check_elementwise(
    optimizer_class: Any, args: Sequence[Any], options: dict[str, Any], device: torch.device
) -> None:
    """Raise ValueError if the step on slices differs from the step on the full tensor. Local.

    An unknown optimizer is tried on a small tensor, and on slices of it, which takes milliseconds.
    Raises TypeError for anything but a subclass of Optimizer.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}"
        )
    if optimizer_class in ELEMENTWISE:
        return
    full = torch.arange(24, dtype=torch.float64, device=device).view(4, 6)

    def make(tensor: Tensor) -> Optimizer:
        return optimizer_class([tensor], *args, **options)

    expected = _trial_update(make, full)
    # A separate optimizer for each slice, as on several ranks.
    actual = torch.cat([_trial_update(make, local) for local in (full[:1], full[1:])])
    if not torch.allclose(expected, actual, rtol=1e-6, atol=1e-9 * float(expected.abs().max())):
        raise ValueError(
            f"{optimizer_class.__name__} does not treat each element on its own: on shards it "
            f"computes other results than on the whole tensor. Use another (SGD, Adam, "
            f"AdamW, Adagrad, RMSprop, …), or full_tensor() and a plain parameter"
        )


def _trial_update(make: Callable[[Tensor], Optimizer], numbers: Tensor) -> Tensor:
    """The change of a parameter after some steps; gradients come from the elements' numbers."""
    parameter = torch.cos(numbers).requires_grad_()
    optimizer = make(parameter)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # a rate that grows from 0 would change nothing

    for step in range(_TRIAL_STEPS):

        def closure(step: int = step) -> Tensor:
            parameter.grad = torch.sin(numbers * (step + 1) + 1) + 0.1 * parameter.detach()
            return parameter.detach().sum()

        closure()
        optimizer.step(closure)  # type: ignore[arg-type]
    return parameter.detach() - torch.cos(numbers)
