"""Counts of writes, for tensors that a user's own Function or a checkpoint has saved.

C++ puts a user's autograd.Function into the graph of the wrappers, in which a DTensor is a leaf. It
compares the versions of wrappers; the writes by way of other views are counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, data_of, is_moved, own_memory

_base: Any = torch._C.TensorBase
_storage_holders: Any = torch._C._storage_Use_Count
#: The count of a storage's holders if a single tensor has it: the tensor, and the asking object.
_ALONE = 2
#: The number of holders of a tensor in C++: the Python object, and nodes of graphs.
holders: Callable[[Tensor], int] = _base._use_count
#: The number that autograd gives the next node of this thread.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: torch's answer for nodes without a number: leaves, and operators without a derivative.
_NO_NUMBER = 2**64 - 1


def number_of(node: Any) -> int:
    """Autograd's number of a node, higher for later nodes; 0 for a node without a number."""
    number = 0 if node is None else int(node._sequence_nr())
    return 0 if number == _NO_NUMBER else number


def is_shown_elsewhere(tensor: DTensorBase) -> bool:
    """True if another tensor shares the memory of a tensor's local tensor. Local."""
    return is_shared(tensor._local_tensor)


def is_shared(tensor: Tensor) -> bool:
    """True if another tensor shares the memory of a plain tensor. Local."""
    storage: Any = tensor.untyped_storage()
    return not storage.nbytes() or _storage_holders(storage._cdata) > _ALONE


def living(known: Iterable[ref[DTensorBase]] | None) -> list[DTensorBase]:
    """The tensors of weak references that still live, even those that only C++ holds."""
    tensors = [tensor for each in known or () if (tensor := each()) is not None]
    for tensor in tensors:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensors


def show_as(tensor: DTensorBase, shown: DTensorBase) -> None:
    """Give the wrapper of ``tensor``, which torch's C++ code reads, the shape of ``shown``."""
    with torch._C.DisableTorchFunctionSubclass():
        _base.data.__set__(tensor, shown)


_WithoutInterception = torch._C.DisableTorchFunctionSubclass
_grad_fn_of = _base.grad_fn.__get__
_is_view = _base._is_view
_increment_version = torch._C._increment_version
_is_grad_enabled = torch.is_grad_enabled
_is_forward_grad_enabled = torch._C._is_fwd_grad_enabled


def note_taken(tensor: DTensorBase) -> None:
    """Note that a user's own Function, or a checkpoint, may save ``tensor``, or a view. Local."""
    if tensor._viewed is None:
        return
    memory = own_memory(tensor)
    known = [each for each in memory.taken if each() is not None and each() is not tensor]
    memory.taken = (*known, ref(tensor))


def leave_graph_of_wrappers(tensor: DTensorBase) -> None:
    """Turn a result of a user's own Function into a leaf in the graph of the wrappers. Local.

    The tensor's place is in the graph of local tensors, and may change by operators in place. A
    further Function that takes the tensor must not pass the gradient to the first Function.
    """
    with _WithoutInterception():
        if _grad_fn_of(tensor) is not None and not _is_view(tensor):
            _base.detach_(tensor)
            _base.requires_grad_(tensor, tensor._local_tensor.requires_grad)


def count_write(*tensors: DTensorBase, graded: bool | None = None) -> None:
    """Note that tensors are about to be written to, for tensors that a user's Function saved.
    Local.

    Args:
        tensors: The tensors.
        graded: True if the writes are recorded in the graph; None: if gradients are on.

    Raises:
        RuntimeError: A write is recorded, and the tensor is a view whose base was given other
            data, or a moved view whose gradient has a hook, which torch would no longer call.

    C++ compares versions of the wrapper that was saved, :func:`check_unwritten` the rest. Writes in
    a Function's own ``forward`` precede saving, and do not count: forward-mode derivatives are off
    there.
    """
    is_on = _is_grad_enabled()
    if not (is_on or _is_forward_grad_enabled() or torch.is_inference_mode_enabled()):
        return
    if graded is None:
        graded = is_on
    number = next_number()
    changed: list[DTensorBase] = []
    for tensor in tensors:
        memory = own_memory(tensor)
        _check_and_add(tensor, graded, changed)
        memory.written_at = number
        if memory.taken:
            changed += living(memory.taken)
    if changed:
        _increment_version(changed)


def _check_and_add(tensor: DTensorBase, graded: bool, changed: list[DTensorBase]) -> None:
    """Add a tensor, and those that it is a view of, to those with a changed version."""
    in_graph = graded and tensor._local_tensor.requires_grad
    while True:
        if tensor._made_without_grad or holders(tensor) > 1:
            changed.append(tensor)
        viewed = tensor._viewed
        if viewed is None or viewed[2] is data_of:
            return
        if in_graph and is_moved(tensor):
            _check_hooks(tensor)
        if graded and viewed[0]._spec is not viewed[1]:
            _check_in_place(tensor, viewed[0])
        tensor = viewed[0]


def _check_hooks(tensor: DTensorBase) -> None:
    """Raise at a write in the graph to a moved view whose gradient is looked at."""
    local = tensor._local_tensor
    if local._backward_hooks or (local.retains_grad and not local.is_leaf):
        raise RuntimeError(
            f"{tensor!r} is a view that had to move elements, and has a hook or retain_grad(): "
            f"torch forgets hooks of a view that is written to. Register the hook afterwards, or "
            f"write to a clone() of it"
        )


def _check_in_place(tensor: DTensorBase, base: DTensorBase) -> None:
    """Raise at a write in the graph to a view whose base was given other data."""
    if 0 in tensor._spec.shape:
        return  # nothing is written
    if tensor._local_tensor.requires_grad and base._local_tensor.requires_grad:
        raise RuntimeError(
            f"{tensor!r} is a view of {base!r} in the graph, which was given other data since "
            f"(x.data = y): gradients of a write to the view would belong to the new data, whose "
            f"elements the view does not show. Write to view.clone(), or to view.detach() under "
            f"no_grad()"
        )


def check_unwritten(function: Any) -> None:
    """Raise, as torch does, if what a user's own Function saved was written to since. Local.

    Args:
        function: The Function's node.
    """
    try:
        saved = getattr(function, "saved_tensors", ())
    except RuntimeError:  # freed, or C++ has seen it: that is said when they are asked for
        return
    for tensor in saved:
        if not isinstance(tensor, DTensorBase):
            continue
        if is_written_since(tensor, function):
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tensor!r}, which {function.name()} saved, was written to "
                f"since: pass a clone() to it, or write to a clone()"
            )


def is_written_since(tensor: DTensorBase, node: Any) -> bool:
    """True if the memory that a tensor shows was written to since a node was made. Local."""
    return tensor._memory is not None and tensor._memory.written_at > number_of(node)
