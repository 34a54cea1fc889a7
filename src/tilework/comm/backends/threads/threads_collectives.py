"""The collectives of the threads backend.

A reduction is made once, for all ranks. In operations that move data, each rank reads the others'
tensors in place: a function copies values at once if no rank may change them, and returns the
other copies, which are made after all ranks have read.

torch releases the interpreter in each call, and a rank gets it back only after all other ranks that
want it. So the number of torch calls per rank does not depend on the number of ranks: a rank
prepares tensors once for all readers, and copies from all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilework.comm.backends.threads.reference import combine
from tilework.comm.forms import MANY_INPUTS, Kind, Operation, Parts, op_factor, op_type, split_parts

#: (outputs, values): copies to be made when every rank has read its peers' tensors.
Writes = list[tuple[Parts, Sequence[Tensor]]]


@dataclass(slots=True, frozen=True)
class Share:
    """A rank's operation, and the flat tensors that the others may read.

    As many tensors as ranks if the operation has an input per rank; none for a barrier; else one
    tensor.
    """

    operation: Operation
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, operation: Operation, size: int) -> Share:
        """The share of a rank in a group of ``size``."""
        if operation.kind in MANY_INPUTS:
            return cls(operation, split_parts(operation.inputs, size))
        parts = operation.outputs if operation.kind == "broadcast" else operation.inputs
        return cls(operation, [part.view(-1) for part in parts])


def copy_flat(target: Tensor, value: Tensor) -> None:
    """Copy the elements of one contiguous tensor to another."""
    with torch.inference_mode():
        target.view(-1).copy_(value.view(-1))


def copy_parts(outputs: Parts, values: Sequence[Tensor]) -> None:
    """Copy ``values``, a flat tensor from each rank, to the ranks' parts of ``outputs``."""
    with torch.inference_mode():
        if isinstance(outputs, Tensor) and not _are_parts(values, outputs):
            torch.cat(list(values), out=outputs.view(-1))
        elif values:
            torch._foreach_copy_(split_parts(outputs, len(values)), list(values))


def reduced(shares: Sequence[Share]) -> Tensor | None:
    """The result of reducing all ranks' inputs, in rank order; None if the operation is no
    reduction.
    """
    first = shares[0].operation
    if first.kind in ("all_reduce", "reduce"):
        contributions = [share.tensors[0] for share in shares]
    elif first.kind == "reduce_scatter":
        contributions = [_in_a_row(share) for share in shares]
    else:
        return None
    with torch.inference_mode():
        factors = [op_factor(share.operation.reduce_op) for share in shares]
        return combine(contributions, op_type(first.reduce_op), factors)


def _in_a_row(share: Share) -> Tensor:
    inputs = share.operation.inputs
    return inputs.view(-1) if isinstance(inputs, Tensor) else torch.cat(list(share.tensors))


def fill(rank: int, own: Share, value: Tensor | None) -> None:
    """Copy the result ``value`` of a reduction to the output of ``rank``, if it has an output. For
    reduce_scatter, copy only the part for ``rank``.
    """
    if value is None or not len(own.operation.outputs):
        return
    if own.operation.kind == "reduce_scatter":
        begin = sum(part.numel() for part in own.tensors[:rank])
        value = value[begin : begin + own.tensors[rank].numel()]
    copy_flat(own.operation.outputs[0], value)


def _broadcast(rank: int, own: Operation, shares: Sequence[Share]) -> Writes:
    if rank != own.root:
        copy_flat(own.outputs[0], shares[own.root].tensors[0])
    return []


def _gather(rank: int, own: Operation, shares: Sequence[Share]) -> Writes:
    if own.kind == "all_gather" or rank == own.root:
        copy_parts(own.outputs, [share.tensors[0] for share in shares])
    return []


def _scatter(rank: int, own: Operation, shares: Sequence[Share]) -> Writes:
    copy_flat(own.outputs[0], shares[own.root].tensors[rank])
    return []


def _all_to_all(rank: int, own: Operation, shares: Sequence[Share]) -> Writes:
    values = [share.tensors[rank] for share in shares]
    # In place, this rank's outputs are inputs that others may still have to read.
    if _are_parts(shares[rank].tensors, own.outputs):
        return [(own.outputs, [value.clone() for value in values])]
    copy_parts(own.outputs, values)
    return []


def _scan(rank: int, own: Operation, shares: Sequence[Share]) -> Writes:
    counted = shares[scanned(own, rank, len(shares))]
    if not counted:
        return []
    factors = [op_factor(share.operation.reduce_op) for share in counted]
    with torch.inference_mode():
        value = combine([share.tensors[0] for share in counted], op_type(own.reduce_op), factors)
    return [(own.outputs, [value])]


def scanned(operation: Operation, rank: int, size: int) -> slice:
    """The ranks whose inputs a scan combines for ``rank``."""
    own = operation.kind == "scan"
    return slice(0, rank + own) if operation.root == 0 else slice(rank + 1 - own, size)


def scan_source(operation: Operation) -> Tensor:
    """This rank's input of a scan, to be gathered: multiplied by the factor of a PREMUL_SUM."""
    source = operation.inputs[0].view(-1)
    if op_type(operation.reduce_op) != "premul_sum":
        return source
    wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
    return wide * op_factor(operation.reduce_op)


def scan_gathered(operation: Operation, rank: int, gathered: Tensor) -> None:
    """Finish a scan: the rows of ``gathered`` are from :func:`scan_source` of all ranks."""
    counted = list(gathered[scanned(operation, rank, len(gathered))])
    if counted:
        op = op_type(operation.reduce_op).removeprefix("premul_")
        copy_flat(operation.outputs[0], combine(counted, op, ()).to(operation.outputs[0].dtype))


def _are_parts(tensors: Sequence[Tensor], outputs: Parts) -> bool:
    """True if some of ``tensors`` are in the memory of ``outputs``. No tensor overlaps an output
    without being a part.
    """
    begins = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
    if isinstance(outputs, Tensor):
        first, end = outputs.data_ptr(), outputs.data_ptr() + outputs.nbytes
        return any(first <= begin < end for begin in begins)
    return any(output.data_ptr() in begins for output in outputs if output.numel())


#: The operations in which each rank reads the others' tensors.
READ_BY_ALL: dict[Kind, Callable[[int, Operation, Sequence[Share]], Writes]] = {
    "broadcast": _broadcast,
    "scan": _scan,
    "exscan": _scan,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
