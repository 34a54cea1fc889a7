"""Means without NaNs, counts of values; cumulative sums, for which ranks exchange totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.op_sharding import DTensorArg, PlacedCall
from tilework.dtensor.propagation.strategy import Strategy
from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.dtensor.rules.slicing import resizable, resized, with_dims_unsharded
from tilework.dtensor.tensor import DTensor
from tilework.tiled import (
    Arg,
    Decomposition,
    Dim,
    Factor,
    LocalRanges,
    RuleResult,
    composed,
    dtensor_rule,
    factors_of,
    local_call,
    unchanged,
)
from tilework.tiled.rules import dims_of, keep_inputs_in_graph, pointwise, sizes_of


@dtensor_rule("nanmean")
def _nanmean(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RuleResult:
    is_refused = not (input.dtype.is_floating_point or input.dtype.is_complex)
    return None if is_refused else Decomposition(_mean_of_numbers)


def _mean_of_numbers(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    input = reduce_partial(input)
    count = (~input.detach().isnan()).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count


# -- counts of values --------------------------------------------------------------------------


@dtensor_rule("histc")
def _histc(input: Arg, bins: int = 100, min: float = 0, max: float = 0) -> RuleResult:
    return Decomposition(_histc_of_range) if min == max else None


def _histc_of_range(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    input = reduce_partial(input)
    if min == max and input.numel():
        min, max = input.min().item(), input.max().item()
    if min == max:
        min, max = min - 1, max + 1
    return torch.histc(input, bins, min, max)


@dtensor_rule("bincount")
@composed
def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    least, most = input.aminmax() if input.numel() else (None, None)
    if least is not None and least.item() < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(minlength, 0 if most is None else int(most.item()) + 1)
    if weights is None or least is None:
        return _counts(input, size)
    return _counts(input, size, weights)


def _counts_rule(input: Arg, size: int, weights: Arg | None = None) -> RuleResult:
    item = Factor(input.shape[0], "item")
    inputs = {input: [item]} if weights is None else {input: [item], weights: [item]}
    linear = [] if weights is None else [[weights]]
    return local_call(inputs, [[None]], linear=linear, shapes=[(size,)])


@internal_operator(_counts_rule)
def _counts(input: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    counts = torch.bincount(input, weights, size)
    if weights is None:
        return counts
    # The counts of an empty shard do not have the dtype of the weights.
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return keep_inputs_in_graph(counts.to(dtype), weights)


def _log_of_sum(x: Tensor, dim: int, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return _finite(x).logsumexp(dim, keepdim)


def _either_log(a: Tensor, b: Tensor) -> Tensor:
    b = _finite(b)
    nothing = b == torch.finfo(b.dtype).min
    return torch.where(nothing, a, torch.stack([a, b.expand_as(a)]).logsumexp(0))


def _finite(x: Tensor) -> Tensor:
    """The logarithms, the least number for 0: gradients of gradients of infinities are none."""
    return x.clamp(min=torch.finfo(x.dtype).min)


#: The total of a shard, and the function that combines it with later shards.
_KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cumsum": (torch.sum, torch.add),
    "cumprod": (torch.prod, torch.mul),
    "logcumsumexp": (_log_of_sum, _either_log),
}


def _shard_number(strategy: LocalRanges, factor: Factor) -> int:
    """The number of this rank's shard of a factor, in the order of shards."""
    assert isinstance(strategy, Strategy)
    strategy.local_range(factor)  # raises if blocks are dealt in turns, which have no such order
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
            local = _accumulated(x, name, dim)
            # Even of no totals: gradients of gradients must take the same way on all ranks.
            before = fold(totals.narrow(dim, 0, place), dim, keepdim=True, dtype=x.dtype)
            return combine(local, before)

        return run

    return local_call({input: factors, totals: others}, [factors], run=make)


@internal_operator(_scan_rule)
def _scan(input: Tensor, totals: Tensor, name: str, dim: int) -> Tensor:
    """Cumulative sums or products along a sharded dim, from the totals of the earlier shards."""
    return _accumulated(input, name, dim)


def _accumulated(x: Tensor, name: str, dim: int) -> Tensor:
    result: Tensor = getattr(torch, name)(x, dim)
    return result.to(x.dtype)


def _in_ranges(input: Tensor) -> Tensor:
    """The values, reduced, in shards that have an order: of no blocks that are dealt in turns."""
    values = reduce_partial(input)
    if not isinstance(values, DTensor):
        return values
    spec = values._spec.without_turns
    return values.redistribute(placements=spec.placements, order=spec.order)


def _register(name: str) -> None:
    @dtensor_rule(name)
    def scan_rule(input: Arg, dim: int, *, dtype: Any = None) -> RuleResult:
        dims = dims_of(input.ndim, dim)
        if not dims or not input.is_sharded(dims[0]):
            return None
        is_log = name == "logcumsumexp"
        if dtype is torch.bool or (is_log and not input.dtype.is_floating_point):
            return None  # torch raises, or takes complex logarithms
        kind = dtype or input.dtype
        if not (kind.is_floating_point or kind.is_complex):
            kind = dtype or torch.int64

        def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
            values = _in_ranges(input).to(kind)
            return _scan(values, _shard_totals(values, name, dims[0]), name, dims[0])

        return Decomposition(run)


for _name in _KINDS:
    _register(_name)


@dtensor_rule("sum_to_size")
def _sum_to_size(input: Arg, *size: Any, **named: Any) -> RuleResult:
    sizes = sizes_of(size or tuple(named.values()))
    if sizes == input.shape:
        return Decomposition(unchanged if sizes else _cloned)  # () is a sum
    lead = input.ndim - len(sizes)
    pairs = [*zip(sizes, input.shape[max(lead, 0) :], strict=False)]
    if lead < 0 or any(size not in (1, whole) for size, whole in pairs):
        return None  # torch refuses it
    ones = [at + lead for at, (size, whole) in enumerate(pairs) if size != whole]

    def compute(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.sum([*range(lead), *ones], keepdim=True).reshape(sizes)

    return Decomposition(compute)


def _cloned(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input.clone()


@dtensor_rule("to_dense", may_be_input=True)
def _to_dense(input: Arg, dtype: torch.dtype | None = None, **_: Any) -> RuleResult:
    return pointwise([input], rearranges=dtype in (None, input.dtype))


# -- the greatest along a dim ------------------------------------------------------------------


def _candidates_rule(input: DTensorArg, k: int, dim: int, largest: bool) -> RuleResult:
    def fewer(shards: Sequence[tuple[int, int]]) -> list[int]:
        return [min(k, size) for _, size in shards]

    source, sizes = resizable(input.spec, {dim: fewer})
    shape = list(input.shape)
    shape[dim] = sum(fewer(source.shards_of(dim)))
    out = resized(source, shape, {i: i for i in range(input.ndim)}, sizes)
    offset, size = source.local_range(dim)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.topk(min(k, size), dim, largest)
        return values, index + offset

    return PlacedCall([source], [out, out], run)


@internal_operator(_candidates_rule)
def _candidates(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest elements of each shard, or all of a smaller one, and their indices."""
    return input.topk(min(k, input.shape[dim]), dim, largest)


@dtensor_rule("topk")
def _topk(
    input: DTensorArg, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> RuleResult:
    dims = dims_of(input.ndim, dim)
    if not dims or not input.is_sharded(dims[0]) or not 0 <= k <= input.shape[dims[0]]:
        return None
    (along,) = dims

    def run(input: DTensor, *_: Any, **__: Any) -> Any:
        x = reduce_partial(input)
        found = _candidates(x.detach(), k, along, largest)
        values, index = (_whole_along(each, along) for each in found)
        best, places = values.topk(k, along, largest, sorted)
        index = index.gather(along, places)
        if x.requires_grad and torch.is_grad_enabled():
            best = reduce_partial(x.gather(along, index))
        return torch.return_types.topk((best, index))

    return Decomposition(run)


def _whole_along(tensor: Tensor, dim: int) -> Tensor:
    assert isinstance(tensor, DTensor)
    spec = with_dims_unsharded(tensor._spec, [dim])
    return tensor.redistribute(placements=spec.placements, order=spec.order)
