"""The memory that a tensor would have, were it plain: full values in the order of its strides."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, DTensorT, wrap_as
from tilework.dtensor.spec import DTensorSpec, Ints

TensorT = TypeVar("TensorT", bound=Tensor)


def memory_order(spec: DTensorSpec) -> Ints:
    """The dims from the one with the largest stride to that with the smallest."""
    return tuple(sorted(range(spec.ndim), key=lambda dim: (-spec.strides[dim], dim)))


def full_in_memory_order(tensor: DTensorBase) -> Tensor:
    """The full value as a plain tensor of its own memory, with the tensor's strides if it is dense.

    Collective; differentiable.
    """
    full = tensor.full_tensor()
    order = memory_order(tensor._spec)
    inverse = [order.index(dim) for dim in range(len(order))]
    return full.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def replicated_as(tensor: DTensorT, full: Tensor) -> DTensorT:
    """A full value, the same on all ranks, as a DTensor on the mesh of another."""
    return wrap_as(type(tensor), full, tensor._spec.replicated)
