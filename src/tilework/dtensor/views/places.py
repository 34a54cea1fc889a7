"""Places in the graph that tensors have left, where results of a user's own Function came from.

C++ puts a user's autograd.Function into the graph of the wrappers, in which a DTensor is a leaf.
Its result is linked to the graph of local tensors when it is first used. An operator in place may
have given the tensor another place there meanwhile: the one before is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, Place

_use_count: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


def keep_place(tensor: DTensorBase) -> None:
    """Keep the place of a tensor that is about to leave it, if C++ has it in a graph. Local."""
    local = tensor._local_tensor
    if local.requires_grad and _use_count(tensor) > 1:
        with torch.inference_mode(False), torch.enable_grad():
            place: Tensor = _Place.apply(local)  # type: ignore[no-untyped-call]
        tensor._places = (*tensor._places, Place(place, tensor._spec))


def place_of(tensor: DTensorBase, local: Tensor, node: Any) -> Place:
    """The place that a tensor had when a Function took it.

    Args:
        tensor: The tensor.
        local: Its local tensor, at the place that it has now.
        node: The Function's node.

    Raises:
        RuntimeError: It has another since, by way of another view.
    """
    number = node._sequence_nr()
    for place in tensor._places:
        if place.local.grad_fn._sequence_nr() > number:  # type: ignore[union-attr]
            return place
    if local.grad_fn is not None and local.grad_fn._sequence_nr() > number:
        raise RuntimeError(
            f"a view of the same memory as {tensor!r} was written to between the call of "
            f"{node.name()}, which took it, and the first use of what that returned: pass a "
            f"clone() to the Function, or write to a clone()"
        )
    return Place(local, tensor._spec)


class _Place(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
