"""Extrema over sharded dims, their indices, and gradients distributed as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.autograd.partial_grads import alias_local
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Shard
from tilework.tiled import (
    Arg,
    Decomposition,
    Factor,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    local_call,
)
from tilework.tiled.rules import any_sharded, extreme_dims, reduce_dims, remaining_dims

# -- internal operators ------------------------------------------------------------------------


def _extreme_rule(input: Arg, name: str, dims: Ints, keepdim: bool) -> RuleResult:
    def make(ranges: LocalRanges, factors: list[Factor]) -> Callable[[Tensor], Tensor]:
        fold: Callable[..., Tensor] = getattr(torch, name)
        if all(ranges.local_size((factors[dim],)) for dim in dims):
            return lambda x: fold(x, dims, keepdim)
        # An empty shard has no extreme. It contributes the identity of the reduction.
        worst = _identity_value(input.dtype, least=name == "amax")
        shape = [
            1 if dim in dims else ranges.local_size((factor,))
            for dim, factor in enumerate(factors)
            if keepdim or dim not in dims
        ]
        return lambda x: x.new_full(shape, worst)

    return reduce_dims(input, dims, keepdim, name.removeprefix("a"), run=make)


@internal_operator(_extreme_rule)
def extreme(input: Tensor, name: str, dims: Ints, keepdim: bool) -> Tensor:
    """``amax`` or ``amin`` without a gradient. Partial along the axes that shard a reduced dim."""
    return getattr(torch, name)(input, dims, keepdim)  # type: ignore[no-any-return]


def _identity_value(dtype: torch.dtype, *, least: bool) -> Any:
    if dtype is torch.bool:
        return not least
    if dtype.is_floating_point:
        return float("-inf" if least else "inf")
    info = torch.iinfo(dtype)
    return info.min if least else info.max


def _first_index_rule(input: Arg, best: Arg, dim: int) -> RuleResult:
    factors = [Factor(size, f"d{at}", reduce_op="min") for at, size in enumerate(input.shape)]
    kept = remaining_dims(factors, (dim,), True)

    def make(ranges: LocalRanges) -> Callable[[Tensor, Tensor], Tensor]:
        offset, size = ranges.local_range(factors[dim])
        none = input.shape[dim]

        def run(x: Tensor, best: Tensor) -> Tensor:
            if size == 0:
                return best.new_full(best.shape, none, dtype=torch.int64)
            hit, at = _equals(x, best).max(dim, keepdim=True)
            return torch.where(hit, at + offset, none)

        return run

    return local_call({input: factors, best: kept}, [kept], run=make)


@internal_operator(_first_index_rule)
def _first_index(input: Tensor, best: Tensor, dim: int) -> Tensor:
    """The first index along ``dim`` at which the input equals ``best``, with ``dim`` of size 1."""
    return _equals(input, best).max(dim, keepdim=True)[1]


def _first_flat_index_rule(input: Arg, best: Arg, ndim: int) -> RuleResult:
    factors = [Factor(size, f"d{at}", reduce_op="min") for at, size in enumerate(input.shape)]

    def make(ranges: LocalRanges) -> Callable[[Tensor, Tensor], Tensor]:
        local_ranges = [ranges.local_range(factor) for factor in factors]

        def run(x: Tensor, best: Tensor) -> Tensor:
            hits = _equals(x, best).reshape(-1)
            flat_index = hits.new_full((), _NOWHERE, dtype=torch.int64)
            if hits.any():
                within = torch.unravel_index(hits.max(0)[1], x.shape)
                flat_index = hits.new_zeros((), dtype=torch.int64)
                for (offset, _), at, extent in zip(local_ranges, within, input.shape, strict=True):
                    flat_index = flat_index * extent + offset + at
            return flat_index.reshape((1,) * ndim)

        return run

    return local_call({input: factors, best: []}, [[None] * ndim], run=make)


_NOWHERE = torch.iinfo(torch.int64).max


@internal_operator(_first_flat_index_rule)
def _first_flat_index(input: Tensor, best: Tensor, ndim: int) -> Tensor:
    """The first flat index at which the input equals ``best``, in ``ndim`` dims of 1."""
    return _equals(input, best).reshape(-1).max(0)[1].reshape((1,) * ndim)


def _equals(x: Tensor, best: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x == best
    return (x == best) | (x.isnan() & best.isnan())


# -- values and places -------------------------------------------------------------------------


class _SharedGradient(LocalFunction):
    """The extreme over all ranks; backward divides the gradient equally among masked elements."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        best: Tensor,
        mask: Tensor,
        count: Tensor,
        layouts: tuple[DTensorSpec, DTensorSpec],
    ) -> Tensor:
        ctx.save_for_backward(mask, count)
        ctx.layouts = layouts
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mask, count = ctx.saved_tensors
        if torch.is_grad_enabled() and grad.requires_grad:  # each rank adds only its own elements
            source, target = ctx.layouts
            axes = tuple(
                axis
                for axis, (had, has) in enumerate(
                    zip(source.placements, target.placements, strict=True)
                )
                if had != has and not isinstance(has, Shard)
            )
            grad = alias_local(grad, target.as_partial(axes), target)
        return grad * mask / count, None, None, None, None


def _extreme_value(
    input: Tensor, name: str, dims: Ints, keepdim: bool, nan_too: bool = False
) -> Tensor:
    """The extremum over dims; all elements that equal it share the gradient."""
    input = reduce_partial(input)
    if not (input.requires_grad and torch.is_grad_enabled()):
        return extreme(input, name, dims, keepdim)
    value = input.detach()
    best = reduce_partial(extreme(value, name, dims, True))
    x, extreme_of_all = _local(value), _local(best)
    mask = _equals(x, extreme_of_all) if nan_too else x == extreme_of_all
    count = reduce_partial(wrap(mask, _spec(input)).sum(dims, keepdim=True))
    return _with_gradient(input, best, mask, _local(count), dims, keepdim)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return local_graph.local_of(tensor)


def _spec(tensor: Tensor) -> DTensorSpec:
    assert isinstance(tensor, DTensor)
    return tensor._spec


def _with_gradient(
    input: Tensor, best: Tensor, mask: Tensor, count: Tensor, dims: Ints, keepdim: bool
) -> Tensor:
    layouts = _spec(input), _spec(best)
    value: Tensor = _SharedGradient.apply(_local(input), _local(best), mask, count, layouts)
    kept = wrap(value, _spec(best))
    return kept if keepdim else _drop_dims(kept, dims)


def _drop_dims(tensor: Tensor, dims: Ints) -> Tensor:
    """Remove dims of size 1, without a sum, which would turn -0.0 into 0.0."""
    return tensor.squeeze(dims).clone()


def _extreme_and_index(input: Tensor, name: str, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The extremum and its first index, whose element gets the gradient."""
    input = reduce_partial(input)
    value = input.detach()
    best = reduce_partial(extreme(value, name, (dim,), True))
    at = reduce_partial(_first_index(value, best, dim))
    index = at if keepdim else _drop_dims(at, (dim,))
    if not (input.requires_grad and torch.is_grad_enabled()):
        return best if keepdim else _drop_dims(best, (dim,)), index
    places = _spec(input).local_indices(dim).to(input.device)
    mask = places.view(-1, *[1] * (input.ndim - dim - 1)) == _local(at)
    count = torch.ones((), device=input.device)
    return _with_gradient(input, best, mask, count, (dim,), keepdim), index


# -- rules -------------------------------------------------------------------------------------


def _sharded_dims(input: Arg, dim: Any) -> Ints | None:
    """The reduced dims, if one is sharded and numbers are real; otherwise None."""
    dims = None if input.dtype.is_complex else extreme_dims(input, dim)
    return None if dims is None or not any_sharded(input, dims) else dims


def _register(name: str) -> None:
    """Register the rules of amax, max and argmax, or of amin, min and argmin."""
    fold = f"a{name}"
    kind = getattr(torch.return_types, name)

    @dtensor_rule(fold)
    def amax(input: Arg, dim: Any = (), keepdim: bool = False) -> RuleResult:
        dims = _sharded_dims(input, dim)
        if dims is None:
            return None
        return Decomposition(lambda input, *_, **__: _extreme_value(input, fold, dims, keepdim))

    @dtensor_rule(name)
    def max(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> RuleResult:
        if isinstance(dim, Arg) or isinstance(other, Arg):
            return None
        dims = _sharded_dims(input, dim)
        if dims is None:
            return None
        if dim is None:
            return Decomposition(
                lambda input: _extreme_value(input, fold, dims, False, nan_too=True)
            )
        return Decomposition(
            lambda input, *_, **__: kind(_extreme_and_index(input, fold, dims[0], keepdim))
        )

    @dtensor_rule(f"arg{name}")
    def argmax(input: Arg, dim: Any = None, keepdim: bool = False) -> RuleResult:
        dims = _sharded_dims(input, dim)
        if dims is None or input.dtype is torch.bool:  # torch refuses the latter
            return None

        def run(input: Tensor, *_: Any, **__: Any) -> Any:
            value = reduce_partial(input).detach()
            if dim is not None:
                return _extreme_and_index(value, fold, dims[0], keepdim)[1]
            best = extreme(value, fold, dims, False)
            return _first_flat_index(value, best, value.ndim if keepdim else 0)

        return Decomposition(run)


_register("max")
_register("min")


@dtensor_rule("aminmax")
def _aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    dims = _sharded_dims(input, dim)
    if dims is None:
        return None

    def run(input: Tensor, **_: Any) -> Any:
        input = reduce_partial(input)
        pair = (
            _extreme_value(input, "amin", dims, keepdim),
            _extreme_value(input, "amax", dims, keepdim),
        )
        return torch.return_types.aminmax(pair)

    return Decomposition(run)
