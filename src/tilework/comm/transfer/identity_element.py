"""Identity elements of reductions: 0 for a sum, the smallest number for a maximum."""

from __future__ import annotations

import torch

from tilework.comm.reduce_op import RedOpType


def identity_element(op: RedOpType, dtype: torch.dtype) -> bool | int | float:
    """The number that changes nothing in a reduction.

    Raises:
        NotImplementedError: The reduction has no identity element.

    Example:
        >>> identity_element(RedOpType.MIN, torch.int8)
        127
    """
    if op in (RedOpType.SUM, RedOpType.BOR, RedOpType.BXOR):
        return 0
    if op is RedOpType.PRODUCT:
        return 1
    if op in (RedOpType.MIN, RedOpType.MAX) and dtype.is_floating_point:
        return float("inf") if op is RedOpType.MIN else -float("inf")
    if op is RedOpType.BAND or op is RedOpType.MIN:
        return _all_ones(dtype) if op is RedOpType.BAND else _limits(dtype)[1]
    if op is RedOpType.MAX:
        return _limits(dtype)[0]
    raise NotImplementedError(
        f"ReduceOp.{op} has no identity element, so no tensor can be made terms of it"
    )


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _all_ones(dtype: torch.dtype) -> int:
    lowest, highest = _limits(dtype)
    return highest if lowest == 0 else -1
