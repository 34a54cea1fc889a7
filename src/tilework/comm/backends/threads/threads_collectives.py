"""The collectives of the threads backend without the core: one rank runs them for all.

torch releases the interpreter in each call, and a rank gets it back only after all other ranks that
want it. So the last rank to come makes all copies, with few torch calls for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.backends.threads.reference import combine
from tilework.comm.forms import MANY_INPUTS, Kind, Operation, Parts, op_factor, op_type, split_parts

#: Flat tensors: those of each rank that the others read, or those that each rank's outputs become.
ByRank = Sequence[Sequence[Tensor]]


def run_together(calls: Sequence[Operation]) -> None:
    """Run a collective, of which ``calls`` has the operation of each rank, in their order."""
    sources = [_sources(call, len(calls)) for call in calls]
    with torch.inference_mode():
        results = _RESULTS[calls[0].kind](calls, sources)
        for call, values in zip(calls, results, strict=False):  # a barrier has none
            if len(call.outputs) and values:
                _copy_parts(call.outputs, values)


def _sources(call: Operation, size: int) -> Sequence[Tensor]:
    if call.kind in MANY_INPUTS:
        return split_parts(call.inputs, size)
    return [part.view(-1) for part in (call.outputs if call.kind == "broadcast" else call.inputs)]


def copy_flat(target: Tensor, value: Tensor) -> None:
    """Copy the elements of one contiguous tensor to another."""
    with torch.inference_mode():
        target.view(-1).copy_(value.view(-1))


def _copy_parts(outputs: Parts, values: Sequence[Tensor]) -> None:
    """Copy ``values``, flat tensors, to the parts of ``outputs``."""
    if isinstance(outputs, Tensor) and not _are_parts(values, outputs):
        torch.cat(list(values), out=outputs.view(-1))
    else:
        torch._foreach_copy_(split_parts(outputs, len(values)), list(values))


def _reduced(calls: Sequence[Operation], sources: ByRank) -> ByRank:
    first = calls[0]
    rows = [
        call.inputs.view(-1) if isinstance(call.inputs, Tensor) else torch.cat(list(parts))
        for call, parts in zip(calls, sources, strict=True)
    ]
    factors = [op_factor(call.reduce_op) for call in calls]
    value = combine(rows, op_type(first.reduce_op), factors)
    if first.kind != "reduce_scatter":
        return [[value]] * len(calls)
    return [[part] for part in torch.split(value, [part.numel() for part in sources[0]])]


def _exchanged(calls: Sequence[Operation], sources: ByRank) -> ByRank:
    # In place, a rank's outputs are inputs that others have still to read.
    if any(_are_parts(parts, call.outputs) for call, parts in zip(calls, sources, strict=True)):
        sources = [[part.clone() for part in parts] for parts in sources]
    return list(zip(*sources, strict=True))


def _scanned(calls: Sequence[Operation], sources: ByRank) -> ByRank:
    size, op = len(calls), op_type(calls[0].reduce_op)
    parts = [source for (source,) in sources]
    factors = [op_factor(call.reduce_op) for call in calls]
    counted = [scanned(calls[0], rank, size) for rank in range(size)]
    return [[combine(parts[c], op, factors[c])] if parts[c] else [] for c in counted]


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


#: What the outputs of each rank become; ignored where the rank has none, as beside a root.
_RESULTS: dict[Kind, Callable[[Sequence[Operation], ByRank], ByRank]] = {
    "barrier": lambda calls, sources: (),
    "broadcast": lambda calls, sources: [
        [] if rank == calls[0].root else sources[calls[0].root] for rank in range(len(calls))
    ],
    "all_reduce": _reduced,
    "reduce": _reduced,
    "reduce_scatter": _reduced,
    "scan": _scanned,
    "exscan": _scanned,
    "all_gather": lambda calls, sources: [[parts[0] for parts in sources]] * len(calls),
    "gather": lambda calls, sources: [[parts[0] for parts in sources]] * len(calls),
    "scatter": lambda calls, sources: [[part] for part in sources[calls[0].root]],
    "all_to_all": _exchanged,
}
