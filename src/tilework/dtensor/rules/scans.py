"""Cumulative sums and products along a sharded dim: ranks exchange only their shards' totals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.propagation.strategy import Strategy
from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.tiled import (
    Arg,
    Decomposition,
    Dim,
    Factor,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    factors_of,
    local_call,
)
from tilework.tiled.rules import dims_of

#: The total of a shard, and the function that combines it with later shards.
_KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cumsum": (torch.sum, torch.add),
    "cumprod": (torch.prod, torch.mul),
}


def _shard_number(strategy: LocalRanges, factor: Factor) -> int:
    """The number of this rank's shard of a factor, in the order of shards."""
    assert isinstance(strategy, Strategy)
    coordinate, place = strategy.mesh.get_coordinate(), 0
    for axis in strategy.axes(factor):
        place = place * strategy.mesh.shape[axis] + (coordinate[axis] if coordinate else 0)
    return place


def _shard_totals_rule(input: DTensorArg, name: str, dim: int) -> RuleResult:
    lengths = [input.spec.mesh.shape[axis] for axis in input.spec.axes_of(dim)]
    count = math.prod(lengths)
    factors = factors_of(input.shape)
    out: list[Factor | Dim | None] = [None if at == dim else f for at, f in enumerate(factors)]
    shape = tuple(count if at == dim else size for at, size in enumerate(input.shape))

    def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
        place = _shard_number(ranges, factors[dim])

        def run(x: Tensor) -> Tensor:
            total = _KINDS[name][0](x, dim, keepdim=True, dtype=x.dtype)
            none = torch.zeros_like(total)
            return torch.cat([none] * place + [total] + [none] * (count - place - 1), dim)

        return run

    return local_call({input: factors}, [out], run=make, shapes=[shape])


@internal_operator(_shard_totals_rule)
def _shard_totals(input: Tensor, name: str, dim: int) -> Tensor:
    """The sum or product of each shard along the dim. A full tensor has a single total."""
    return _KINDS[name][0](input, dim, keepdim=True, dtype=input.dtype)


def _scan_rule(input: Arg, totals: Arg, name: str, dim: int) -> RuleResult:
    factors = factors_of(input.shape)
    others: list[Factor | Dim | None] = [None if at == dim else f for at, f in enumerate(factors)]

    def make(ranges: LocalRanges) -> Callable[[Tensor, Tensor], Tensor]:
        place = _shard_number(ranges, factors[dim])
        fold, combine = _KINDS[name]

        def run(x: Tensor, totals: Tensor) -> Tensor:
            local: Tensor = getattr(torch, name)(x, dim, dtype=x.dtype)
            # Even of no totals: gradients of gradients must take the same way on all ranks.
            before = fold(totals.narrow(dim, 0, place), dim, keepdim=True, dtype=x.dtype)
            return combine(local, before)

        return run

    return local_call({input: factors, totals: others}, [factors], run=make)


@internal_operator(_scan_rule)
def _scan(input: Tensor, totals: Tensor, name: str, dim: int) -> Tensor:
    """Cumulative sums or products along a sharded dim, from the totals of the earlier shards."""
    result: Tensor = getattr(torch, name)(input, dim, dtype=input.dtype)
    return result


def _register(name: str) -> None:
    @dtensor_rule(name)
    def scan_rule(input: Arg, dim: int, *, dtype: Any = None) -> RuleResult:
        dims = dims_of(input.ndim, dim)
        if not dims or not input.is_sharded(dims[0]):
            return None
        if dtype is torch.bool:
            return None  # torch raises
        kind = dtype or input.dtype
        if not (kind.is_floating_point or kind.is_complex):
            kind = dtype or torch.int64

        def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
            values = reduce_partial(input).to(kind)
            return _scan(values, _shard_totals(values, name, dims[0]), name, dims[0])

        return Decomposition(run)


_register("cumsum")
_register("cumprod")
