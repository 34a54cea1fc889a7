"""What ranks tell each other before a collective, and whether they agree."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from tilework.comm.backends.engine_protocol import Kind, Operation, Parts, op_type

_KINDS: tuple[Kind, ...] = get_args(Kind)
_DTYPES: tuple[torch.dtype | None, ...] = (
    None,
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)
_REDUCTIONS = (
    *("none", "sum", "avg", "product", "min", "max"),
    *("band", "bor", "bxor", "premul_sum"),
)
_FIELDS = ("operation", "dtype", "reduction", "root", "shape")
#: For counts: kinds that compare shapes instead.
_NOTHING = -1


def header_bytes(size: int) -> int:
    """How long a rank's header is in a group of ``size``."""
    return 8 * (len(_FIELDS) + 2 * size)


def header_of(operation: Operation, rank: int, size: int) -> Tensor:
    """An int64 vector: the fields, the elements for each rank, those expected from each."""
    fields = [
        _KINDS.index(operation.kind),
        _dtype_code(operation.dtype),
        _REDUCTIONS.index(op_type(operation.reduce_op)),
        operation.root,
        hash(operation.shape) & 0x7FFF_FFFF_FFFF_FFFF,
    ]
    sent, wanted = _sent(operation, rank, size), _wanted(operation, rank, size)
    return torch.tensor([*fields, *sent, *wanted], dtype=torch.int64)


def _dtype_code(dtype: torch.dtype | None) -> int:
    """Equal for equal dtypes, also for those that are no numbers."""
    return _DTYPES.index(dtype) if dtype in _DTYPES else zlib.crc32(str(dtype).encode())


def _counts(parts: Parts, size: int) -> list[int]:
    if isinstance(parts, Tensor):
        return [parts.numel() // size] * size
    return [part.numel() for part in parts]


def _only(rank: int, size: int, count: int) -> list[int]:
    counts = [_NOTHING] * size
    counts[rank] = count
    return counts


def _sent(op: Operation, rank: int, size: int) -> list[int]:
    if op.kind == "all_gather":
        return [op.inputs[0].numel()] * size
    if op.kind == "gather":
        return _only(op.root, size, op.inputs[0].numel())
    if op.kind in ("reduce_scatter", "all_to_all") or (op.kind == "scatter" and rank == op.root):
        return _counts(op.inputs, size)
    return [_NOTHING] * size


def _wanted(op: Operation, rank: int, size: int) -> list[int]:
    if op.kind == "reduce_scatter":
        return [op.outputs[0].numel()] * size
    if op.kind == "scatter":
        return _only(op.root, size, op.outputs[0].numel())
    if op.kind in ("all_gather", "all_to_all") or (op.kind == "gather" and rank == op.root):
        return _counts(op.outputs, size)
    return [_NOTHING] * size


def disagreement(headers: Tensor) -> tuple[Sequence[int], str]:
    """The ranks at odds with rank 0 or with each other's sizes, and in what; () if all agree.

    Args:
        headers: One row per rank, as from :func:`header_of`.
    """
    size, fields = len(headers), len(_FIELDS)
    odd = (headers[:, :fields] != headers[0, :fields]).nonzero()
    if len(odd):
        column = int(odd[:, 1].min())
        ranks = odd[odd[:, 1] == column][:, 0].tolist()
        return (0, *ranks), f"they differ in {_FIELDS[column]}"
    sent, wanted = headers[:, fields : fields + size], headers[:, fields + size :]
    if torch.equal(sent, wanted.T):
        return (), ""
    i, j = (sent != wanted.T).nonzero()[0].tolist()
    return (i, j), (
        f"they differ in sizes: rank {i} has {int(sent[i, j])} elements for rank {j}, "
        f"which expects {int(wanted[j, i])}"
    )
