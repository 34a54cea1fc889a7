"""The greatest and the least elements of dims that are not sharded, and where they are."""

from __future__ import annotations

from typing import Any

from tilework.layout.box import Ints
from tilework.tiled.op_rules import Arg, RuleResult
from tilework.tiled.op_table import rule
from tilework.tiled.rules.elementwise import pointwise
from tilework.tiled.rules.reduction_args import dims_of, numpy_names, reduce_dims


def extreme_dims(input: Arg, dim: Any) -> Ints | None:
    """The dims that are reduced; None if they have no elements, or torch refuses them."""
    dims = dims_of(input.ndim, dim)
    return None if dims is None or not all(input.shape[dim] for dim in dims) else dims


@rule("amax", "amin")
@numpy_names
def _amax(input: Arg, dim: Any = (), keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None)


@rule("max", "min")
@numpy_names
def _max(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> RuleResult:
    if isinstance(dim, Arg) or isinstance(other, Arg):
        return pointwise([arg for arg in (input, dim, other) if isinstance(arg, Arg)])
    dims = extreme_dims(input, dim)
    if dims is None:
        return None
    return reduce_dims(input, dims, keepdim, None, results=1 if dim is None else 2)


@rule("argmax", "argmin")
@numpy_names
def _argmax(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None)


@rule("aminmax")
@numpy_names
def _aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None, results=2)
