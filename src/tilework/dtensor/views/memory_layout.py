"""The memory that a plain tensor would have: full values, in the order of the strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilework.dtensor.base import APART, DTensorBase, DTensorT, Viewed, memory_of, owner_of, wrap_as
from tilework.dtensor.spec import DTensorSpec, Ints


def memory_order(spec: DTensorSpec) -> Ints:
    """The dims, from the largest stride to the smallest."""
    return tuple(sorted(range(spec.ndim), key=lambda dim: (-spec.strides[dim], dim)))


def full_in_memory_order(tensor: DTensorBase) -> Tensor:
    """The full value as a plain tensor in new memory, with the tensor's strides if it is dense.

    Collective; differentiable.
    """
    full = tensor.full_tensor()
    order = memory_order(tensor._spec)
    inverse = [order.index(dim) for dim in range(len(order))]
    return full.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def replicated_as(tensor: DTensorT, full: Tensor) -> DTensorT:
    """A full value, the same on all ranks, as a DTensor on the mesh of another."""
    return wrap_as(type(tensor), full, tensor._spec.replicated)


# -- places in memory ------------------------------------------------------------------------


class Window(NamedTuple):
    """A view of a memory: shape, strides and offset, as for ``torch.as_strided``.

    Attributes:
        size: The size of each dim.
        strides: The stride of each dim, in elements.
        offset: The place of the first element in the memory, in elements.
    """

    size: Ints
    strides: Ints
    offset: int

    @property
    def stop(self) -> int:
        """The place after the last element; 0 without elements."""
        if 0 in self.size:
            return 0
        steps = zip(self.size, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)

    def of(self, memory: Tensor) -> Tensor:
        """The elements of ``memory`` that are in the window."""
        return memory.as_strided(*self)


def window_of(tensor: DTensorBase) -> Window:
    """The window through which a tensor would show memory, were it a plain tensor. Local."""
    return Window(tensor._spec.shape, tensor._spec.strides, offset_of(tensor))


def window_after(tensor: DTensorBase, change: Callable[[Tensor], Tensor]) -> Window:
    """The window, in a tensor's memory, of the view that ``change`` makes of the tensor. Local.

    ``change`` is called with a meta tensor.
    """
    with torch.no_grad():
        shown = change(_meta_at(tensor._spec, tensor.dtype, offset_of(tensor)))
    return Window(tuple(shown.shape), tuple(shown.stride()), int(shown.storage_offset()))


def offset_of(tensor: DTensorBase) -> int:
    """The storage offset, in elements, that a tensor would have, were it plain. Local."""
    return _start(tensor._viewed)


def room_of(tensor: DTensorBase) -> int:
    """The number of elements in the memory that a tensor shows. Local."""
    return memory_of(tensor).room or window_of(owner_of(tensor)).stop


def _start(viewed: Viewed | int | None) -> int:
    if viewed is None or isinstance(viewed, int):
        return viewed or 0
    base, spec, func, args, kwargs, before = viewed
    start = _start(before)
    if func is None or func in APART:
        return start
    with torch.no_grad():
        shown = func(_meta_at(spec, base.dtype, start), *args[1:], **kwargs)
    return int(shown.storage_offset())


def _meta_at(spec: DTensorSpec, dtype: torch.dtype, start: int) -> Tensor:
    extent = (
        start
        + 1
        + sum(
            (size - 1) * stride
            for size, stride in zip(spec.shape, spec.strides, strict=True)
            if size
        )
    )
    memory = torch.empty(max(extent, 0), dtype=dtype, device="meta")
    return memory.as_strided(spec.shape, spec.strides, start)
