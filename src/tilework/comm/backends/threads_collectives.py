"""The collectives of the threads backend: each reads the other ranks' tensors where they are.

A function copies at once what no rank changes meanwhile, and returns what is to be written once all
ranks have read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.backends.engine_protocol import Kind, Operation, op_factor, op_type, split_parts
from tilework.comm.backends.reference import combine

#: (output, value): copies to be made when every rank has read its peers' tensors.
Writes = list[tuple[Tensor, Tensor]]


def copy(target: Tensor, value: Tensor) -> None:
    """Copy the elements of one contiguous tensor to another."""
    with torch.inference_mode():
        target.view(-1).copy_(value.view(-1))


def _barrier(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    return []


def _broadcast(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    if rank != own.root:
        copy(own.outputs[0], operations[own.root].outputs[0])
    return []


def _all_reduce(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    if not len(own.outputs):
        return []
    return [(own.outputs[0], _combined([op.inputs[0] for op in operations], operations))]


def _combined(parts: Sequence[Tensor], operations: Sequence[Operation]) -> Tensor:
    with torch.inference_mode():
        factors = [op_factor(op.reduce_op) for op in operations]
        return combine(parts, op_type(operations[0].reduce_op), factors)


def _gather(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    if own.kind == "all_gather" or rank == own.root:
        outputs = split_parts(own.outputs, len(operations))
        for target, op in zip(outputs, operations, strict=True):
            copy(target, op.inputs[0])
    return []


def _scatter(rank: int, own: Operation, operations: Sequence[Operation]) -> Writes:
    copy(own.outputs[0], operations[own.root].inputs[rank])
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
        copy(target, value)
    return []


COLLECTIVES: dict[Kind, Callable[[int, Operation, Sequence[Operation]], Writes]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
