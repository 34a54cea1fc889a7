"""The reductions of the threads backend, in plain torch; tests compare the core with them.

Contributions are combined in rank order, so every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from operator import and_, or_, xor

import torch
from torch import Tensor

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FOLDS = {
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": and_,
    "bor": or_,
    "bxor": xor,
}
#: Reductions of truth values.
_BOOL = {
    "sum": or_,
    "max": or_,
    "bor": or_,
    "product": and_,
    "min": and_,
    "band": and_,
    "bxor": xor,
}


def combine(parts: Sequence[Tensor], op: str, factors: Sequence[float]) -> Tensor:
    """The reduction ``op`` (as "sum" or "premul_sum", which reads a factor per rank) of the ranks'
    tensors, as a new tensor of their dtype and shape.
    """
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return fold(_BOOL[op], parts[1:], parts[0].clone())
    if dtype in _SIGNED:
        return _combine_unsigned(parts, op, _SIGNED[dtype])
    if dtype in (torch.float16, torch.bfloat16):
        wide = combine([part.float() for part in parts], op, factors)
        return wide.to(dtype)
    if op == "premul_sum":
        parts = [part * factor for part, factor in zip(parts, factors, strict=True)]
    total = parts[0].clone()
    for part in parts[1:]:
        total = total.add_(part) if op in ("sum", "avg", "premul_sum") else _FOLDS[op](total, part)
    return total.div_(len(parts)) if op == "avg" else total


def _combine_unsigned(parts: Sequence[Tensor], op: str, signed: torch.dtype) -> Tensor:
    """Reduce wide unsigned integers as signed ones, with the top bit flipped."""
    views = [part.view(signed) for part in parts]
    top = torch.iinfo(signed).min if op in ("min", "max") else 0
    total = combine([view ^ top for view in views], op, ())
    return (total ^ top).view(parts[0].dtype)
