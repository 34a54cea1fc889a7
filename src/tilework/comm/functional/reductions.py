"""Reductions as text, as the schemas of operators take them."""

from __future__ import annotations

import functools

from tilework.comm.functional.tracing import constant
from tilework.comm.reduce_op import AnyReduceOp, RedOpType, ReduceOp, no_reduction

_FACTOR = "premul_sum*"


@constant
def op_text(op: AnyReduceOp | str) -> str:
    """``op`` as text that :func:`reduction` reads, like "sum" or "premul_sum*0.5".

    Raises:
        ValueError: There is no such reduction.
        TypeError: ``op`` is neither a reduction nor text.
    """
    if isinstance(op, str):
        return op_text(reduction(op.lower()))
    if isinstance(op, RedOpType):
        return str(op.value)
    if not isinstance(op, ReduceOp):
        raise TypeError(no_reduction(op))
    if op.type is RedOpType.PREMUL_SUM:
        return f"{_FACTOR}{op.factor!r}"
    return str(op.type.value)


@functools.lru_cache(maxsize=256)
def reduction(text: str) -> AnyReduceOp:
    """The reduction that ``text`` spells.

    Raises:
        ValueError: There is no such reduction.
    """
    try:
        if text.startswith(_FACTOR):
            return ReduceOp(RedOpType.PREMUL_SUM, float(text.removeprefix(_FACTOR)))
        return RedOpType(text)
    except ValueError:
        names = ", ".join(member.value for member in RedOpType)
        raise ValueError(f"unknown reduction {text!r}; known are {names}") from None


def factor_of(text: str) -> float | None:
    """The factor of a PREMUL_SUM in the form ``text``; None for other reductions."""
    return float(text.removeprefix(_FACTOR)) if text.startswith(_FACTOR) else None
