"""Sorting, selection and accumulation along a dim, which is unshardable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.layout.internal import Ints
from tilework.tiled.factors import Dim, Factor, broadcast, factors_of
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    RuleResult,
    local_call,
    unchanged,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import allow_empty_shards, keep_inputs_in_graph
from tilework.tiled.rules.reduction_args import dims_of, reduce_dims, remaining_dims, sums_partial


def factors_but(shape: Ints, without: Ints = ()) -> list[Factor | Dim | None]:
    """A factor for each dim; None for the dims in ``without``, which must be unsharded."""
    return _all_but(factors_of(shape), without)


def _all_but(factors: Sequence[Factor], without: Ints) -> list[Factor | Dim | None]:
    return [None if at in without else factor for at, factor in enumerate(factors)]


def _along(
    input: Arg,
    dim: Any,
    results: int,
    *,
    linear: bool = False,
    on_empty: Callable[[Tensor], Any] | None = None,
) -> RuleResult:
    """The call of an operator along ``dim``; ``on_empty`` computes empty tensors with a graph."""
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    factors = factors_but(input.shape, dims)
    return local_call(
        {input: factors},
        [factors] * results,
        linear=[[input]] if linear else [],
        run=on_empty and allow_empty_shards(on_empty),
    )


def _register_running(name: str, results: int) -> None:
    on_empty = getattr(Tensor, name)

    @rule(name)
    def answer(input: Arg, dim: int, **dtype: Any) -> RuleResult:
        return _along(input, dim, results, on_empty=lambda x: on_empty(x, dim, **dtype))


_register_running("logcumsumexp", 1)
_register_running("cumprod", 1)
_register_running("cummax", 2)
_register_running("cummin", 2)


@rule("cumsum")
def _cumsum(input: Arg, dim: int, *, dtype: Any = None) -> RuleResult:
    return _along(input, dim, 1, linear=sums_partial(input, dtype))


def _register_sort(name: str, results: int) -> None:
    @rule(name)
    def answer(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        # The forms are (dim, descending) and (*, stable, dim, descending).
        dim = kwargs.get("dim", next((arg for arg in args if type(arg) is int), -1))
        return _along(input, dim, results)


_register_sort("sort", 2)
_register_sort("argsort", 1)
rule("msort")(lambda input: _along(input, 0, 1))
rule("topk")(lambda input, k, dim=-1, largest=True, sorted=True: _along(input, dim, 2))


@rule("mode")
def _mode(input: Arg, dim: int | None = -1, keepdim: bool = False) -> RuleResult:
    if dim is None:  # a median of all elements
        return None
    return reduce_dims(input, dims_of(input.ndim, dim), keepdim, None, results=2)


rule("kthvalue")(lambda input, k, dim=-1, keepdim=False: _mode(input, dim, keepdim))
rule("median", "nanmedian")(lambda input, dim=None, keepdim=False: _mode(input, dim, keepdim))


def _register_quantile(name: str) -> None:
    quantile: Callable[..., Tensor] = getattr(torch, name)

    @rule(name)
    def answer(
        input: Arg,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> RuleResult:
        dims = dims_of(input.ndim, dim)
        if dims is None or 0 in input.shape:
            return None  # without elements torch raises when run
        if dim is None:
            ones = (1,) * (input.ndim * keepdim)

            def of_all(input: Tensor, q: Any, *_: Any, **__: Any) -> Tensor:
                values = quantile(input.flatten(), q, 0, interpolation=interpolation)
                return values.reshape((*values.shape, *ones))

            return Decomposition(of_all)
        factors = factors_of(input.shape)
        left = remaining_dims(factors, dims, keepdim)
        levels: list[Factor | Dim | None] = [None] * q.ndim if isinstance(q, Arg) else []

        def make(ranges: LocalRanges) -> Callable[..., Tensor]:
            sizes = [
                1 if at in dims else ranges.local_size((factor,))
                for at, factor in enumerate(factors)
                if keepdim or at not in dims
            ]
            if 0 in sizes:  # torch takes no empty tensor
                several = q.shape if isinstance(q, Arg) else ()

                def of_none(x: Tensor, *levels: Tensor) -> Tensor:
                    quantile(x.new_zeros(1), levels[0] if levels else q)  # which torch checks
                    return keep_inputs_in_graph(x.reshape(*several, *sizes), *levels)

                return of_none
            return lambda x, q=q: quantile(x, q, dim, keepdim, interpolation=interpolation)

        inputs = {input: _all_but(factors, dims)}
        if isinstance(q, Arg):
            inputs[q] = levels
        return local_call(inputs, [[*levels, *left]], run=make)


_register_quantile("quantile")
_register_quantile("nanquantile")


@rule("diff")
def _diff(
    input: Arg, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    tensors = [arg for arg in (input, prepend, append) if isinstance(arg, Arg)]
    factors = factors_but(input.shape, dims)
    if any(arg.ndim != input.ndim for arg in tensors):
        return None
    if n > 0 and len(tensors) == 1 and 0 in [input.shape[at] for at in dims]:
        return Decomposition(unchanged)  # torch takes as many differences as there are elements
    return local_call(dict.fromkeys(tensors, factors), [factors], linear=[tensors])


rule("trapezoid", "trapz")(lambda y, x=None, *, dx=1, dim=-1: _integral(y, x, dim, keeps=False))
rule("cumulative_trapezoid")(lambda y, x=None, *, dx=1, dim=-1: _integral(y, x, dim, keeps=True))


def _integral(y: Arg, x: Any, dim: int, *, keeps: bool) -> RuleResult:
    dims = dims_of(y.ndim, dim)
    if dims is None:
        return None
    # The points of x: one for each place along the dim, or one for each element.
    for_each = isinstance(x, Arg) and x.ndim != 1
    if for_each and x.ndim > y.ndim:
        return None
    tensors = [y, x] if for_each else [y]
    factors, dims_of_each = broadcast([each.shape for each in tensors])
    out = _all_but(factors, dims) if keeps else remaining_dims(factors, dims, False)
    summed = {factors[at] for at in dims}
    inputs: dict[Arg, Any] = {
        each: [None if summed & set(loops) else loops for loops in of_each]
        for each, of_each in zip(tensors, dims_of_each, strict=True)
    }
    if isinstance(x, Arg):
        inputs.setdefault(x, [None])
    return local_call(inputs, [out], linear=[[y]])


@rule("gradient")
def _gradient(
    input: Arg, *, spacing: Any = 1, dim: int | Sequence[int] | None = None, edge_order: int = 1
) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if dims is None:
        return None
    loops = factors_but(input.shape, dims)
    inputs: dict[Arg, list[Factor | Dim | None]] = {input: loops}
    for arg in spacing if isinstance(spacing, (list, tuple)) else [spacing]:
        if isinstance(arg, Arg):
            inputs[arg] = [None] * arg.ndim
    return local_call(inputs, [loops] * len(dims), linear=[[input]])


@rule("searchsorted")
def _searchsorted(
    sorted_sequence: Arg,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Any = None,
) -> RuleResult:
    # A sorted sequence for each row of values, or one for all.
    rows = factors_but(sorted_sequence.shape[:-1])
    given = {sorted_sequence: [*rows, None]}
    if isinstance(sorter, Arg):
        given[sorter] = [*rows, None]
    if not isinstance(input, Arg):
        return local_call(given, [[]])
    if rows and input.ndim != sorted_sequence.ndim:
        return None
    dims = given[input] = (
        [*rows, *factors_but(input.shape[-1:])] if rows else factors_but(input.shape)
    )
    return local_call(given, [dims])


@rule("bucketize")
def _bucketize(
    input: Any, boundaries: Arg, *, out_int32: bool = False, right: bool = False
) -> RuleResult:
    if not isinstance(input, Arg):
        return local_call({boundaries: [None]}, [[]])
    dims = factors_but(input.shape)
    return local_call({input: dims, boundaries: [None]}, [dims])
