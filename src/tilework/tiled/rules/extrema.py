"""max, min, amax, amin, aminmax, argmax and argmin: the dims that they reduce are unshardable."""

from __future__ import annotations

from typing import Any

from tilework.layout.internal import Ints
from tilework.tiled.op_rules import Arg, RuleResult
from tilework.tiled.op_table import rule
from tilework.tiled.rules.elementwise import pointwise
from tilework.tiled.rules.reduction_args import dims_of, reduce_dims


def extreme_dims(input: Arg, dim: Any) -> Ints | None:
    """The dims to reduce; None if a dim is empty or ``dim`` is invalid, for which torch raises."""
    dims = dims_of(input.ndim, dim)
    return None if dims is None or not all(input.shape[dim] for dim in dims) else dims


def _register(name: str) -> None:
    """Register the rules of amax and max, or of amin and min."""

    @rule(f"a{name}")
    def amax(input: Arg, dim: Any = (), keepdim: bool = False) -> RuleResult:
        dims = extreme_dims(input, dim)
        return None if dims is None else reduce_dims(input, dims, keepdim, None, extremum=name)

    @rule(name)
    def max(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> RuleResult:
        if isinstance(dim, Arg) or isinstance(other, Arg):
            given = [arg for arg in (input, dim, other) if isinstance(arg, Arg)]
            return pointwise(given, extremum=name)
        dims = extreme_dims(input, dim)
        if dims is None:
            return None
        if dim is None:
            return reduce_dims(input, dims, keepdim, None, extremum=name)
        return reduce_dims(input, dims, keepdim, None, results=2)


_register("max")
_register("min")


@rule("argmax", "argmin")
def _argmax(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None)


@rule("aminmax")
def _aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    dims = extreme_dims(input, dim)
    return None if dims is None else reduce_dims(input, dims, keepdim, None, results=2)
