"""Arguments of reductions: dims, numpy's names of arguments, and the dims of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilework.layout.internal import Ints
from tilework.tiled.factors import Dim, Factor
from tilework.tiled.op_rules import Arg, LocalCall, LocalRanges, MakeRun, local_call

#: Sums of these dtypes wrap around: partial sums cannot be cast, scaled or divided.
NARROW = {torch.bool, torch.uint8, torch.int8, torch.int16}


def dims_of(ndim: int, dim: Any) -> Ints | None:
    """The dims of an argument ``dim``, counted from 0; None if torch's operator refuses them."""
    given = dim if isinstance(dim, (list, tuple)) else () if dim is None else (dim,)
    if not given:
        return tuple(range(ndim))
    if any(not isinstance(at, int) for at in given):
        return None
    if ndim == 0:
        return () if all(at in (0, -1) for at in given) else None
    if any(not -ndim <= at < ndim for at in given):
        return None
    dims = tuple(at % ndim for at in given)
    return dims if len(set(dims)) == len(dims) else None


def reduce_dims(
    input: Arg,
    dims: Ints | None,
    keepdim: bool,
    reduce_op: str | None,
    *,
    results: int = 1,
    linear: bool = False,
    extremum: str | None = None,
    run: Callable[[LocalRanges, list[Factor]], Callable[..., Any]] | None = None,
) -> LocalCall | None:
    """The call of a reduction by ``reduce_op`` (None: of unsharded dims); None without ``dims``."""
    if dims is None:
        return None
    factors = [
        Factor(size, f"d{dim}", unshardable=reduce_op is None and dim in dims, reduce_op=reduce_op)
        for dim, size in enumerate(input.shape)
    ]
    make: MakeRun | None = None if run is None else lambda ranges: run(ranges, factors)
    left = remaining_dims(factors, dims, keepdim)
    shape = tuple(factor.size if isinstance(factor, Factor) else 1 for factor in left)
    return local_call(
        {input: factors},
        [left] * results,
        linear=[[input]] if linear else [],
        extremum=extremum,
        run=make,
        shapes=[shape] * results,
    )


def remaining_dims(dims: Sequence[Factor], gone: Ints, keepdim: bool) -> list[Factor | Dim | None]:
    """The factors of the dims of a reduction's result."""
    return [
        None if dim in gone else factor
        for dim, factor in enumerate(dims)
        if keepdim or dim not in gone
    ]


def any_sharded(input: Arg, dims: Ints) -> bool:
    """True if one of these dims is sharded."""
    return any(map(input.is_sharded, dims))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are accumulated in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def keeps_sums(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if partial sums may be cast before they are reduced: a rounded sum is another."""
    if dtype is other:
        return True
    if other in NARROW or _is_float8(dtype) or _is_float8(other):  # not promoted
        return False
    if torch.promote_types(dtype, other) is not dtype:
        return False
    if other.is_floating_point or other.is_complex:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    digits = torch.finfo(dtype).eps ** -1  # integers up to this are exact
    return digits >= torch.iinfo(other).max


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def sums_partial(input: Arg, dtype: torch.dtype | None) -> bool:
    """True if partial sums may be summed before they are reduced, cast to ``dtype`` first."""
    is_whole = not (input.dtype.is_floating_point or input.dtype.is_complex)
    return keeps_sums(dtype or (torch.int64 if is_whole else input.dtype), input.dtype)
