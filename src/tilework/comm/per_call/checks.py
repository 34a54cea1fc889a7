"""Checks of the arguments of one call, before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilework.comm.contract import ProcessGroup
from tilework.comm.forms import Form, Operation, Parts, Side, is_absent
from tilework.comm.pretence import current_pretence
from tilework.comm.reduce_op import check_reduction
from tilework.comm.world import get_global_rank, get_group_rank

_PLAIN = (Tensor, Parameter)
#: The order of the sides of a collective in messages.
_ORDER = ("whole", "one", "each")
#: Storages without memory have fewer bytes than 2 to this power.
_STORAGE_BITS = 48
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def check_tensor(value: Any, name: str) -> Tensor:
    """``value``, or the tensor in a functional collective's result; raises for anything else."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {value!r} of {type(value)}")
    is_plain = type(value) in _PLAIN
    if not is_plain:
        refuse_parts(value, name)
        value = awaited(value)
    if value.layout is not torch.strided or value.is_meta or value.is_nested:
        if value.is_meta and not lacks_memory(value):
            return value  # type: ignore[no-any-return]
        kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
        kind = "nested" if value.is_nested else kind
        raise ValueError(
            f"{name} is a {kind} tensor, which collectives cannot move; pass a dense tensor "
            f"with data (to_dense(), or move its values and indices)"
        )
    if not (is_plain or has_memory(value)):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which has no memory of its own: collectives take "
            f"plain tensors, such as those that it holds"
        )
    return value  # type: ignore[no-any-return]


def awaited(tensor: Tensor) -> Tensor:
    """The tensor inside a functional collective's result, also torch's, awaited; or ``tensor``."""
    if type(tensor) in _PLAIN:
        return tensor
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def has_memory(tensor: Tensor) -> bool:
    """True unless the tensor wraps other tensors, which have the elements."""
    if type(tensor) in _PLAIN or not tensor.numel():
        return True
    if tensor.untyped_storage().device.type == "meta":  # torch's FakeTensors warn otherwise
        return False
    return tensor.data_ptr() != 0


def lacks_memory(tensor: Tensor) -> bool:
    """True for a tensor on meta, which gets memory later, where a real rank has it there."""
    pretence = current_pretence() if tensor.is_meta else None
    return tensor.is_meta and (pretence is None or pretence.is_absent(tensor))


def device_kind(tensor: Tensor) -> str:
    """The kind of device that computes with a tensor; on a pretended rank that of the job."""
    pretence = current_pretence() if tensor.is_meta else None
    return tensor.device.type if pretence is None else pretence.device


def address_of(tensor: Tensor) -> int:
    """The first element's address; without memory a number that counts bytes in a storage."""
    if not tensor.is_meta:
        return tensor.data_ptr()
    place = int(tensor.storage_offset()) * tensor.itemsize
    storage: int = tensor.untyped_storage()._cdata
    return (storage << _STORAGE_BITS) + place


def refuse_parts(value: Tensor, name: str) -> None:
    """Raise TypeError for a tensor whose parts lie on several ranks: a DTensor, for one."""
    if type(value) is not Tensor and hasattr(value, "full_tensor"):
        theirs = type(value).__module__.startswith("torch.")
        whose = " of torch.distributed.tensor" if theirs else ""
        raise TypeError(
            f"{name} is a {type(value).__name__}{whose}, whose parts lie on several ranks: "
            f"collectives take plain tensors, such as its local tensor ({name}.to_local())"
        )


def check_tensors(values: Any, name: str, count: int | None = None) -> list[Tensor]:
    """:func:`check_tensor` of each element of a list, of ``count`` tensors (None: any number)."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of tensors, got {type(values)}")
    tensors = [check_tensor(value, f"{name}[{i}]") for i, value in enumerate(values)]
    if count is not None and len(values) != count:
        raise ValueError(
            f"{name} must have one tensor for each of the group's {count} ranks, got {len(values)}"
        )
    return tensors


def same_dtype(tensors: Iterable[Tensor], mix_complex: bool = True) -> None:
    """Raise ValueError if dtypes differ; ``mix_complex`` takes complex64 for two float32."""
    first = None
    for tensor in tensors:
        dtype = _REAL_OF.get(tensor.dtype, tensor.dtype) if mix_complex else tensor.dtype
        first = first or dtype
        if dtype != first:
            raise ValueError(
                f"one call was given tensors with different dtypes, {first} and "
                f"{tensor.dtype}: convert them to one dtype"
            )


def same_device(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless all tensors are on the same device."""
    first = None
    for tensor in tensors:
        first = tensor if first is None else first
        if tensor.device != first.device and not _are_pretended(tensor, first):
            raise ValueError(
                f"one call was given tensors on different devices, {first.device} and "
                f"{tensor.device}: move them to one device"
            )


def _are_pretended(*tensors: Tensor) -> bool:
    """True if a pretended rank has these tensors on one device, some of them without memory."""
    return current_pretence() is not None and not any(map(lacks_memory, tensors))


def _elements(tensor: Tensor) -> int:
    """The number of elements, where a complex number counts as two."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()


def check_splits(tensor: Tensor, splits: Sequence[int] | None, name: str, size: int) -> list[int]:
    """The checked rows (dim 0) of ``tensor`` for each of ``size`` ranks; empty for equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None or len(splits) == 0:  # may be an array or a tensor, which has no truth value
        if tensor.numel() and rows % size:
            raise ValueError(
                f"{name} has {rows} rows, which do not divide equally among {size} ranks; give "
                f"{name}_split_sizes"
            )
        return []
    sizes = [int(split) for split in splits]
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}_split_sizes must be {size} numbers that sum to {name}'s {rows} rows, got "
            f"{sizes}"
        )
    return sizes


def group_root(
    pg: ProcessGroup,
    root: int | None,
    group_root: int | None,
    name: str,
    default: int | None = None,
) -> int:
    """The root's group rank, from either rank, or the global rank ``default``; or ValueError."""
    if group_root is None:
        known = pg.group_ranks.get(root)  # the usual case, in one step
        if known is not None:
            return known
    if root is not None and group_root is not None:
        raise ValueError(f"give {name} or group_{name}, not both: got {root} and {group_root}")
    if group_root is not None:
        get_global_rank(pg, group_root)
        return group_root
    if root is None:
        root = default
    if root is None:
        raise ValueError(f"give {name} (a global rank) or group_{name} (a rank of the group)")
    return get_group_rank(pg, root)


def check_operation(operation: Operation, rank: int, size: int) -> None:
    """Check the tensors of a collective as the caller gave them, in a group of ``size`` ranks.

    Afterwards results of functional collectives are plain tensors, and rows are lists.
    """
    form, is_root = operation.form, rank == operation.root
    outputs = _side(form.outputs, operation.outputs)
    inputs = outputs if form.inputs == form.outputs else _side(form.inputs, operation.inputs)
    if not form.in_place:
        same_dtype([*outputs, *inputs], mix_complex=not form.reduces)
        for side, tensors in ((form.outputs, outputs), (form.inputs, inputs)):
            if side.parts == "each":
                _check_count(side, tensors, form.root, is_root, size)
        same_device([*outputs, *inputs])
    if form.reduces:
        check_reduction(operation.reduce_op, inputs[0].dtype)
    if form.has_rows:
        operation.out_rows = check_splits(outputs[0], operation.out_rows, "output", size)
        operation.in_rows = check_splits(inputs[0], operation.in_rows, "input", size)
    elif not form.in_place:
        _check_sizes(form, inputs, outputs, rank, size)
    operation.inputs = _as_given(form.inputs, inputs)
    operation.outputs = _as_given(form.outputs, outputs)


def _side(side: Side, given: Any) -> list[Tensor]:
    if side.parts == "none" or (side.at_root and is_absent(given)):
        return []
    if side.parts == "each":
        return check_tensors(given, side.name)
    return [check_tensor(given, side.name)]


def _as_given(side: Side, tensors: list[Tensor]) -> Parts:
    if not tensors:
        return ()
    return tensors if side.parts == "each" else tensors[0]


def _check_count(side: Side, tensors: list[Tensor], root: str, is_root: bool, size: int) -> None:
    if side.at_root and is_root and not tensors:
        raise ValueError(f"{side.name} must be given on {root}, one tensor per rank")
    if is_root or not side.at_root:
        check_tensors(tensors, side.name, size)
    elif tensors:
        raise ValueError(f"{side.name} must not be given except on {root}: pass None")


def _check_sizes(
    form: Form, inputs: list[Tensor], outputs: list[Tensor], rank: int, size: int
) -> None:
    """Raise ValueError unless this rank's part of the inputs fits that of the outputs."""
    own = []
    for side, tensors in ((form.inputs, inputs), (form.outputs, outputs)):
        if tensors:
            in_list = side.parts == "each"
            name = f"{side.name}[{rank}]" if in_list else side.name
            own.append((side.parts, tensors[rank if in_list else 0], name))
    if len(own) < 2:
        return
    (parts, a, a_name), (_, b, b_name) = sorted(own, key=lambda each: _ORDER.index(each[0]))
    if _elements(a) == (size if parts == "whole" else 1) * _elements(b):
        return
    if parts == "whole":
        raise ValueError(
            f"{a_name} must have {size} times the elements of {b_name}, for {size} ranks: got "
            f"shapes {list(a.shape)} and {list(b.shape)}"
        )
    raise ValueError(
        f"{a_name} has shape {list(a.shape)} and {b_name} has shape {list(b.shape)}: both must "
        f"have the same number of elements"
    )
