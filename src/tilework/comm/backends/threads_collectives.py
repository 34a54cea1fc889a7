"""The collectives of the threads backend.

A reduction is made once, for all ranks. Where data is moved, each rank reads the others' tensors
where they are: a function copies at once what no rank changes meanwhile, and returns what is to be
written once all ranks have read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.backends.engine_protocol import Kind, Operation, op_factor, op_type, split_parts
from tilework.comm.backends.reference import combine

#: (output, value): copies to be made when every rank has read its peers' tensors.
Writes = list[tuple[Tensor, Tensor]]


def copy_flat(target: Tensor, value: Tensor) -> None:
    """Copy the elements of one contiguous tensor to another."""
    with torch.inference_mode():
        target.view(-1).copy_(value.view(-1))


def _broadcast(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    if rank != own.root:
        copy_flat(own.outputs[0], operations[own.root].outputs[0])
    return []


def reduced(operations: Sequence[Operation]) -> Tensor | None:
    """The value that all ranks get, by rank order; None where each gets its own, or none."""
    if operations[0].kind not in ("all_reduce", "reduce"):
        return None
    return _combined([op.inputs[0] for op in operations], operations)


def fill(own: Operation, value: Tensor | None) -> None:
    """Copy a value to a rank's output, if it has any."""
    if value is not None and len(own.outputs):
        copy_flat(own.outputs[0], value)


def _combined(parts: Sequence[Tensor], operations: Sequence[Operation]) -> Tensor:
    with torch.inference_mode():
        factors = [op_factor(op.reduce_op) for op in operations]
        return combine(parts, op_type(operations[0].reduce_op), factors)


def _gather(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    if own.kind == "all_gather" or rank == own.root:
        outputs = split_parts(own.outputs, len(operations))
        for target, op in zip(outputs, operations, strict=True):
            copy_flat(target, op.inputs[0])
    return []


def _scatter(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    copy_flat(own.outputs[0], operations[own.root].inputs[rank])
    return []


def _reduce_scatter(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    output, size = own.outputs[0], len(operations)
    parts = [split_parts(op.inputs, size)[rank].view(output.shape) for op in operations]
    return [(output, _combined(parts, operations))]


def _all_to_all(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    size = len(operations)
    targets = split_parts(own.outputs, size)
    values = [split_parts(op.inputs, size)[rank] for op in operations]
    # In place, this rank's outputs are inputs that others may still have to read.
    inputs = {part.data_ptr() for part in split_parts(own.inputs, size) if part.numel()}
    if any(target.data_ptr() in inputs for target in targets if target.numel()):
        return [(target, value.clone()) for target, value in zip(targets, values, strict=True)]
    for target, value in zip(targets, values, strict=True):
        copy_flat(target, value)
    return []


#: The operations in which each rank reads the others' tensors.
READ_BY_ALL: dict[Kind, Callable[[int, Operation, Sequence[Operation]], Writes]] = {
    "broadcast": _broadcast,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
