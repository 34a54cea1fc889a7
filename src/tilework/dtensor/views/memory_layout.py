"""The memory that a plain tensor would have: full values, in the order of the strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, DTensorT, base_then, data_of, owner_of, wrap_as
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


def full_memory(tensor: DTensorBase) -> Tensor:
    """All elements of the memory that a tensor shows, in a plain tensor of one dim.

    Collective; differentiable with respect to the tensor, as in torch.
    """
    owner = owner_of(tensor)
    if owner is tensor:
        return _flat(tensor)
    with torch.no_grad():
        memory = in_dtype(_flat(owner.detach()).clone(), tensor.dtype)  # type: ignore[arg-type]
    window_of(tensor).of(memory).copy_(tensor.full_tensor())
    return memory


def in_dtype(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of one dim, shown as elements of another dtype."""
    return memory if memory.dtype == dtype else memory.view(dtype)


def _flat(owner: DTensorBase) -> Tensor:
    full = full_in_memory_order(owner)
    return full.permute(memory_order(owner._spec)).reshape(-1)


def write_memory(tensor: DTensorBase, memory: Tensor) -> None:
    """Write all elements of the memory that a tensor shows. Collective; differentiable.

    This counts as a write to the tensor.
    """
    owner = owner_of(tensor)
    order = memory_order(owner._spec)
    inverse = [order.index(dim) for dim in range(len(order))]
    shape = [owner.shape[dim] for dim in order]
    if owner is tensor:
        tensor.copy_(replicated_as(tensor, memory.view(shape).permute(inverse)))
        return
    with torch.no_grad():
        full = in_dtype(memory.detach(), owner.dtype).view(shape).permute(inverse)
        shown = owner.data if counts_apart(tensor) else owner.detach()
        shown.copy_(replicated_as(owner, full))
    if torch.is_grad_enabled() and (memory.requires_grad or tensor.requires_grad):
        tensor.copy_(replicated_as(tensor, window_of(tensor).of(memory)))


def counts_apart(tensor: DTensorBase) -> bool:
    """True if torch counts writes to a tensor apart from writes to the memory's owner. Local."""
    while (viewed := tensor._viewed) is not None:
        if viewed[2] is data_of:
            return True
        tensor = viewed[0]
    return False


def root_in_memory(tensor: DTensorBase) -> DTensorBase:
    """The last base of a view in the same memory and graph, or the tensor itself. Local."""
    while tensor._viewed is not None and tensor._viewed[2] not in (Tensor.detach, data_of):
        base = base_then(tensor)
        if base is None:
            break
        tensor = base
    return tensor


def offset_of(tensor: DTensorBase) -> int:
    """The storage offset, in elements, that a tensor would have, were it plain. Local."""
    if tensor._viewed is None or (base := base_then(tensor)) is None:
        return 0
    _, spec, func, args, kwargs = tensor._viewed
    start = offset_of(base)
    if func is None:
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
