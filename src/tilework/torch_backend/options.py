"""torch's options of one call, in tilework's terms."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from tilework.comm.contract import AnyReduceOp, ReduceOp, make_premul_sum

_c10d: Any = torch._C._distributed_c10d
_OPS: dict[Any, AnyReduceOp] = {
    getattr(_c10d.ReduceOp, op.name): op
    for op in ReduceOp.RedOpType  # type: ignore[attr-defined]
    if op is not ReduceOp.PREMUL_SUM
}


def is_async(opts: Any) -> bool:
    """True if the call is to return before the operation is done; torch's default, also in C++."""
    return opts is None or getattr(opts, "asyncOp", True)


def reduction(opts: Any) -> AnyReduceOp:
    """The reduction that ``opts`` ask for; the sum if ``opts`` are None."""
    if opts is None:
        return ReduceOp.SUM
    asked = opts.reduceOp
    found = _OPS.get(asked.op)
    return _premul_sum(asked) if found is None else found


def _premul_sum(asked: Any) -> AnyReduceOp:
    factor = getattr(asked, "factor", None)
    if factor is None:
        raise NotImplementedError(
            f"this torch ({torch.__version__}) does not tell the factor of a PREMUL_SUM to "
            f"backends written in Python: scale the tensor and use SUM"
        )
    return make_premul_sum(factor)


def root(opts: Any) -> int:
    """The group rank of the root in ``opts``; 0 if ``opts`` are None."""
    return 0 if opts is None else int(opts.rootRank)


def time_limit(opts: Any) -> timedelta | None:
    """The call's own timeout; None where it has none (torch writes -1 ms)."""
    limit: timedelta | None = None if opts is None else opts.timeout
    return limit if limit is not None and limit > timedelta(0) else None
