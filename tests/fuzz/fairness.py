"""Statements that are left out of random programs: what torch gives depends on how it loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: What copies; a sum does where it adds up single elements.
_COPIES = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.sum.dim_IntList,
}


class Fairness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether operators on plain tensors mean one thing only.

    They do not where one reads some of the elements that it writes by way of another view: torch
    refuses it only of dense tensors. Nor are programs fair where torch gives ``out=`` with
    elements another shape, or casts to another dtype: DTensors refuse such an ``out=``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_fair = True
        #: The memories that were written to.
        self.written: set[int] = set()
        #: Of the memory of a copy: the copy, and the tensor that was copied.
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        written, read = _written_and_read(func, args, kwargs or {})
        if any(_is_torn(target, other) for target in written for other in read):
            self.is_fair = False
        self.written |= {x.untyped_storage()._cdata for x in written if x.numel()}
        before = [(x.shape, x.untyped_storage().nbytes()) for x in written]
        if "out" in func._overloadname:
            kinds = {x.dtype for x in read if x.is_floating_point() or x.is_complex()}
            self.is_fair &= all(kinds <= {x.dtype} for x in written)
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and result.numel() == args[0].numel():
            self.copies[result.untyped_storage()._cdata] = result, args[0]
        for target, (shape, size) in zip(written, before, strict=True):
            if size and target.shape != shape:
                self.is_fair = False
        return result


def _written_and_read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    written: list[Tensor] = []
    read: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[number] if number < len(args) else None)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(x for x in tree_leaves(value) if isinstance(x, Tensor))
    return written, read


def _is_torn(target: Tensor, other: Tensor) -> bool:
    """True if tensors share some elements, but are not the same ones in the same order."""
    if target.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    windows = [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (target, other)]
    return windows[0] != windows[1] and not _bytes_of(target).isdisjoint(_bytes_of(other))


def _bytes_of(tensor: Tensor) -> set[int]:
    """The place in memory of each element; elements of tensors of other dtypes overlap less."""
    places = torch.zeros((), dtype=torch.long)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return {
        (int(tensor.storage_offset()) + int(place)) * tensor.itemsize
        for place in places.flatten().tolist()
    }
