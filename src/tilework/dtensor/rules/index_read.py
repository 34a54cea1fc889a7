"""Reading elements by index tensors: index_select, gather, take, and advanced indexing.

From a sharded dim each rank reads the local elements, and has zeros for others: partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.dispatch.results import full_value, replicated
from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.dtensor.tensor import DTensor
from tilework.tiled import (
    Arg,
    Decomposition,
    DimFactors,
    Factor,
    LocalRanges,
    RuleResult,
    broadcast,
    broadcast_shape,
    composed,
    dtensor_rule,
    local_call,
)
from tilework.tiled.rules import (
    LocalIndexRange,
    common_shape,
    dim_at,
    keep_inputs_in_graph,
    zero_addend,
)

#: The index tensor of each dim, or None for a dim that is not indexed.
Indices = Sequence[Any]


def as_replicated(value: Tensor, like: DTensor) -> DTensor:
    """Make a replicated DTensor on the mesh of ``like`` from a plain tensor, equal on all ranks."""
    return replicated(value, like._spec.mesh)


def indexed_factors(input: Arg) -> list[Factor]:
    """A factor for each dim that is read by index; zeros of other ranks are added, or compared."""
    reduce_op = "max" if input.dtype is torch.bool else "sum"
    return [Factor(size, f"d{i}", reduce_op=reduce_op) for i, size in enumerate(input.shape)]


def index_dims_start(indices: Indices) -> int:
    """The first dim of the result that comes from index tensors: 0 unless they are adjacent."""
    at = [dim for dim, index in enumerate(indices) if index is not None]
    return at[0] if at[-1] - at[0] + 1 == len(at) else 0


def broadcast_indices(indices: Indices) -> tuple[list[Factor], list[DimFactors]]:
    """The factors of the shape to which indices broadcast, and of their dims, or IndexError."""
    shapes = [index.shape for index in indices if index is not None]
    try:
        broadcast_shape(shapes)
    except ValueError:
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}"
        ) from None
    return broadcast(shapes)


# -- indexing's own operator -----------------------------------------------------------------


def _take_rule(input: Arg, indices: Indices) -> RuleResult:
    dims = indexed_factors(input)
    factors, index_dims = broadcast_indices(indices)
    at = index_dims_start(indices)
    out = [factor for factor, index in zip(dims, indices, strict=True) if index is None]
    out[at:at] = factors
    index_tensors = [index for index in indices if index is not None]

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        spans = [
            LocalIndexRange(ranges, factor, 0 not in input.shape)
            for factor, index in zip(dims, indices, strict=True)
            if index is not None
        ]
        return lambda x, *places: _read_local(x, _at_indexed_dims(indices, places), spans, at)

    return local_call(
        {input: dims, **dict(zip(index_tensors, index_dims, strict=True))},
        [out],
        linear=[[input]],
        run=run,
    )


@internal_operator(_take_rule)
def take_at(input: Tensor, indices: Indices) -> Tensor:
    """``input[indices]``, with an index tensor of integers or None for each dim."""
    return input[tuple(slice(None) if index is None else index for index in indices)]


def _at_indexed_dims(indices: Indices, places: Sequence[Tensor]) -> list[Tensor | None]:
    """The local index tensors at the dims that they index; None for the others."""
    rest = iter(places)
    return [None if index is None else next(rest) for index in indices]


def local_indices(
    places: Sequence[Tensor | None], spans: Sequence[LocalIndexRange], is_empty: bool = False
) -> tuple[list[Any], Tensor | None]:
    """Local indices of elements, and a mask of the elements that are local (None: all are).

    ``places`` has for each dim global indices, or None; ``spans`` the ranges of the dims that have
    some. ``is_empty``: the local tensor has no elements. Raises IndexError for an index out of the
    global range.
    """
    rest = iter(spans)
    # torch does not check indices of an empty tensor. It would not see those of other ranks either.
    checks_all = is_empty or not all(span.is_full for span in spans)
    at: list[Any] = []
    here: Tensor | None = None
    for place in places:
        if place is None:
            at.append(slice(None))
            continue
        span = next(rest)
        if span.is_full:
            if checks_all:
                span.localize(place.where(place >= 0, place + span.total))
            at.append(place)
            continue
        number, is_local = span.localize(place.where(place >= 0, place + span.total))
        at.append(number)
        here = is_local if here is None else here & is_local
    if here is not None:
        here = here.expand(common_shape(*[place.shape for place in places if place is not None]))
    return at, here


def _read_local(
    x: Tensor, places: Sequence[Tensor | None], spans: Sequence[LocalIndexRange], front: int
) -> Tensor:
    at, here = local_indices(places, spans, not x.numel())
    if here is None:
        return _index_local(x, at)
    if x.numel() == 0:
        shape = [size for size, place in zip(x.shape, places, strict=True) if place is None]
        shape[front:front] = common_shape(*[place.shape for place in places if place is not None])
        return keep_inputs_in_graph(x.new_full(shape, zero_addend(x.dtype)), x)
    values = _index_local(x, at)
    after = values.dim() - front - here.dim()
    elsewhere = ~here.reshape(here.shape + (1,) * after)
    return values.masked_fill(elsewhere, zero_addend(x.dtype))


def _index_local(x: Tensor, at: Sequence[Any]) -> Tensor:
    indexed = [dim for dim, place in enumerate(at) if isinstance(place, Tensor)]
    if len(indexed) == 1 and at[indexed[0]].dim() == 1:
        # The same, with a faster backward.
        dim, place = indexed[0], at[indexed[0]]
        if place.numel() == 0 or place.min() >= 0:
            return x.index_select(dim, place)
    return x[tuple(at)]


# -- torch's operators -----------------------------------------------------------------------


@dtensor_rule("index_select")
@composed
def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    index = reduce_partial(index)
    numbers = local_graph.plain(index)
    if numbers.numel() and int(numbers.min()) < 0:
        raise IndexError(f"index_select takes no negative index, got {int(numbers.min())}")
    if input.dim() == 0:
        return take_at(input.reshape(1), [index.reshape(-1)]).reshape(())
    indices: list[Any] = [None] * input.dim()
    indices[dim] = index.reshape(-1)
    return take_at(input, indices)


@dtensor_rule("gather")
def _gather(input: Arg, dim: int, index: Arg, *, sparse_grad: bool = False) -> RuleResult:
    if not input.ndim or not index.ndim or (input.ndim != index.ndim and 0 in index.shape):
        return Decomposition(_gather_few)
    if input.ndim != index.ndim:
        return None  # torch refuses it
    dim = dim_at(dim, input.ndim)
    if any(index.shape[i] > input.shape[i] for i in range(input.ndim) if i != dim):
        return None
    if any(index.shape[i] < input.shape[i] for i in range(input.ndim) if i != dim):
        return Decomposition(_gather_among)
    factors = indexed_factors(input)
    wanted = list(factors)
    wanted[dim] = Factor(index.shape[dim], "wanted")

    def run(ranges: LocalRanges) -> Callable[[Tensor, Tensor], Tensor]:
        span = LocalIndexRange(ranges, factors[dim])

        def look_up(x: Tensor, places: Tensor) -> Tensor:
            if span.is_full:
                return x.gather(dim, places)
            at, here = span.localize(places)
            if x.numel() == 0:
                zeros = x.new_full(places.shape, zero_addend(x.dtype))
                return keep_inputs_in_graph(zeros, x)
            return x.gather(dim, at).masked_fill(~here, zero_addend(x.dtype))

        return look_up

    return local_call({input: factors, index: wanted}, [wanted], linear=[[input]], run=run)


def _gather_few(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """The elements for indices of no dims, or none for no indices, of any number of dims."""
    flat = input.reshape(-1)
    if 0 in index.shape:
        return flat[:0].reshape(index.shape)
    return flat.gather(0, index.reshape(-1)).reshape(index.shape)


def _gather_among(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return narrow_to(input, index, dim).gather(dim, index)


def narrow_to(tensor: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Narrow each dim of ``tensor``, except ``dim``, that is longer than in ``other``."""
    for i in range(tensor.dim()):
        if (dim is None or i != dim % tensor.dim()) and other.shape[i] < tensor.shape[i]:
            tensor = tensor.narrow(i, 0, other.shape[i])
    return tensor


@dtensor_rule("take")
@composed
def _take(input: Tensor, index: Tensor) -> Tensor:
    return take_at(input.reshape(-1), [index.reshape(-1)]).reshape(index.shape)


@dtensor_rule("take_along_dim")
@composed
def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    indices = torch.where(indices < 0, indices + input.shape[dim], indices)
    sizes, wanted = list(input.shape), list(indices.shape)
    sizes[dim] = wanted[dim] = 1
    both = list(common_shape(sizes, wanted))
    sizes, wanted = list(both), list(both)
    sizes[dim], wanted[dim] = input.shape[dim], indices.shape[dim]
    return input.expand(sizes).gather(dim, indices.expand(wanted))


@dtensor_rule("repeat_interleave")
def _repeat_interleave(
    input: Arg, repeats: Any = None, dim: Any = None, *, output_size: int | None = None
) -> RuleResult:
    if repeats is None or isinstance(repeats, int):
        return None
    return Decomposition(_repeat_each, is_checked=output_size is not None)


def _repeat_each(
    input: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """The elements of a dim, each repeated the number of times that ``repeats`` gives."""
    if dim is None:
        input, dim = input.flatten(), 0
    counts = full_value(repeats, "repeat_interleave")
    count = input.shape[dim]
    places = torch.arange(count, device=counts.device)
    places = places.repeat_interleave(counts.expand(count), output_size=output_size)
    return input.index_select(dim, places)


# -- masks -----------------------------------------------------------------------------------


@dtensor_rule("nonzero", "argwhere")
@composed
def _nonzero(input: DTensor, *, as_tuple: bool = False) -> Any:
    """The indices of non-zero elements, replicated; only a mask is communicated."""
    mask = input if input.dtype is torch.bool else input != 0
    places = full_value(mask.detach(), "nonzero").nonzero()
    if not as_tuple:
        return as_replicated(places, input)
    if input.dim() == 0:
        places = places.new_zeros((len(places), 1))
    return tuple([as_replicated(indices, input) for indices in places.unbind(1)])


@dtensor_rule("masked_select")
def _masked_select(input: Arg, mask: Arg) -> RuleResult:
    if mask.dtype is not torch.bool:  # indexing would read it as indices
        return None  # torch raises when the call runs

    def compute(input: Tensor, mask: Tensor) -> Tensor:
        shape = common_shape(input.shape, mask.shape)
        return input.expand(shape)[mask.expand(shape)]

    return Decomposition(compute)


@dtensor_rule("masked_scatter")
def _masked_scatter(input: Arg, mask: Arg, source: Arg) -> RuleResult:
    if mask.dtype is not torch.bool or source.dtype != input.dtype:
        return None  # torch raises where it is run

    def compute(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        shape = common_shape(input.shape, mask.shape)
        full = full_value(mask, "masked_scatter").expand(shape)
        places = full.reshape(-1).cumsum(0).reshape(shape) - 1
        if places.numel() and places.max() >= source.numel():
            raise RuntimeError(
                f"masked_scatter: the mask has {int(places.max()) + 1} elements set, but the "
                f"source has only {source.numel()}"
            )
        # The source must be in the graph even if no element is taken from it.
        flat = source.reshape(-1)
        values = flat[places.clamp(min=0)] if source.numel() else flat.sum(dtype=source.dtype)
        return torch.where(mask, values, input)

    return Decomposition(compute)


@dtensor_rule("isin")
def _isin(elements: Any, test_elements: Any, **_: Any) -> RuleResult:
    inputs = {arg: [None] * arg.ndim for arg in (elements, test_elements) if isinstance(arg, Arg)}
    if not isinstance(elements, Arg):
        return local_call(inputs, [[]])
    factors = [Factor(size) for size in elements.shape]
    return local_call({**inputs, elements: factors}, [factors])
