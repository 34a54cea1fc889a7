"""Writing elements by index tensors: index_put, scatter, index_add, and their like.

In a sharded dim each rank writes the elements of the local shard; the tensor's layout stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.dispatch.results import replicated
from tilework.dtensor.propagation.dtensor_call import tensors_in
from tilework.dtensor.rules.index_read import (
    Indices,
    broadcast_indices,
    index_dims_start,
    local_indices,
)
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.tensor import DTensor
from tilework.tiled import (
    Arg,
    Decomposition,
    Factor,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    local_call,
)
from tilework.tiled.rules import LocalIndexRange, common_shape

# -- indexing's own operator -----------------------------------------------------------------


def _put_rule(input: Arg, indices: Indices, values: Arg, accumulate: bool) -> RuleResult:
    dims = [Factor(size, f"d{i}", reduce_op=None) for i, size in enumerate(input.shape)]
    factors, _ = broadcast_indices(indices)
    at = index_dims_start(indices)
    result: list[Factor | None] = [
        factor for factor, index in zip(dims, indices, strict=True) if index is None
    ]
    result[at:at] = [None] * len(factors)
    have = result[len(result) - values.ndim :]
    if values.ndim > len(result):
        return None
    inputs: dict[Arg, Any] = {index: [None] * index.ndim for index in indices if index is not None}
    inputs[input] = dims
    inputs[values] = [
        factor if factor is not None and factor.size == size else None
        for factor, size in zip(have, values.shape, strict=True)
    ]

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        spans = [
            LocalIndexRange(ranges, factor, 0 not in input.shape)
            for factor, index in zip(dims, indices, strict=True)
            if index is not None
        ]

        def put(x: Tensor, *rest: Tensor) -> Tensor:
            index_tensors = iter(rest[:-1])
            places = [None if index is None else next(index_tensors) for index in indices]
            return _put_local(x, places, rest[-1], accumulate, spans, at)

        return put

    return local_call(inputs, [dims], linear=[[input, values]], run=run)


@internal_operator(_put_rule)
def put_at_(input: Tensor, indices: Indices, values: Tensor, accumulate: bool) -> Tensor:
    """``input[indices] = values``, with an index tensor of integers or None for each dim."""
    return _index_put_(input, list(indices), values, accumulate)  # type: ignore[no-any-return]


#: The ATen operator, since the method does not accept None among indices.
_index_put_ = torch.ops.aten.index_put_.default


def _none_for_slices(places: Indices) -> list[Any]:
    return [None if isinstance(place, slice) else place for place in places]


def _put_local(
    x: Tensor,
    places: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool,
    spans: Sequence[LocalIndexRange],
    front: int,
) -> Tensor:
    at, here = local_indices(places, spans, not x.numel())
    if here is None:
        return _index_put_(x, _none_for_slices(at), values, accumulate)  # type: ignore[no-any-return]
    shape = common_shape(*[place.shape for place in places if place is not None])
    rest = [size for size, place in zip(x.shape, places, strict=True) if place is None]
    mine = here.expand(shape).reshape(-1).nonzero().squeeze(1)
    whole_shape = [*rest[:front], *shape, *rest[front:]]
    flat = [*rest[:front], here.expand(shape).numel(), *rest[front:]]
    values = values.expand(whole_shape).reshape(flat).index_select(front, mine)
    numbers = [
        None if isinstance(place, slice) else place.expand(shape).reshape(-1)[mine] for place in at
    ]
    if front == 0 and any(place is None for place in numbers):
        # The indices now have one dim, which stands in front unless indexed dims are adjacent.
        adjacent = index_dims_start(numbers)
        values = values.movedim(0, adjacent)
    return _index_put_(x, numbers, values, accumulate)  # type: ignore[no-any-return]


# -- torch's operators -----------------------------------------------------------------------


def on_mesh(input: Tensor, *others: Any) -> DTensor:
    """The tensor as a DTensor; a plain tensor becomes replicated on the mesh of ``others``."""
    if isinstance(input, DTensor):
        return input
    first = next(tensor for tensor in tensors_in(others) if isinstance(tensor, DTensor))
    return replicated(input, first._spec.mesh)


def register_writer(
    name: str, local_rule: Callable[..., RuleResult], write: Callable[..., Any]
) -> None:
    """Register the rules of an operator that writes elements, and of the in-place form.

    ``local_rule`` is for calls that run on shards as they are, and returns None for others; the
    first argument is True if the call writes in place. ``write`` writes to the first argument by
    other operators.
    """

    def rule(writes: bool, composed: Callable[..., Any]) -> Callable[..., RuleResult]:
        def choose(*args: Any, **named: Any) -> RuleResult:
            return local_rule(writes, *args, **named) or Decomposition(composed)

        return choose

    def anew(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = on_mesh(input, *args, *kwargs.values()).clone()
        write(copy, *args, **kwargs)
        return copy

    def in_place(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        write(input, *args, **kwargs)
        return input

    dtensor_rule(name)(rule(False, anew))
    dtensor_rule(getattr(Tensor, name + "_"))(rule(True, in_place))


def no_local_rule(*_: Any, **__: Any) -> None:
    """Return None: the operator never runs on the shards without communication."""


def _put_flat(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> None:
    """``put_``: write the elements of ``source`` to flat indices of the tensor."""
    if index.numel() != source.numel():
        raise RuntimeError(
            f"put_ takes an index and a source of equally many elements, got an index of shape "
            f"{list(index.shape)} and a source of shape {list(source.shape)}"
        )
    numbers = index.reshape(-1)
    numbers = torch.where(numbers < 0, numbers + input.numel(), numbers)
    places: list[Any] = []
    for size in reversed(input.shape[1:]):
        places.insert(0, numbers % size)
        numbers = numbers // size
    if input.dim():  # an index out of range stays out of range in the first dim
        places.insert(0, torch.where(numbers < 0, input.shape[0], numbers))
    if not places:
        sums = accumulate or not source.numel()
        input.copy_(input + source.sum() if sums else source.reshape(-1)[-1])
        return
    put_at_(input, places, source.reshape(-1), accumulate)


register_writer("put", no_local_rule, _put_flat)


# -- along one dim, with an index of one dim -------------------------------------------------


def _index_rule(linear: bool) -> Callable[..., RuleResult]:
    """The local rule of an operator with an index along one dim that is not sharded."""

    def here(
        writes: bool, input: Arg, dim: Any, index: Arg, source: Any = None, *_: Any, **named: Any
    ) -> RuleResult:
        source = source if source is not None else named.get("source", named.get("value"))
        if not input.ndim or input.is_sharded(dim) or not isinstance(index, Arg):
            return None
        dims: list[Factor | None] = [
            Factor(size, f"d{i}", reduce_op=None) for i, size in enumerate(input.shape)
        ]
        source_dims = list(dims)
        source_dims[dim] = None
        inputs: dict[Arg, Any] = {input: dims, index: [None] * index.ndim}
        if isinstance(source, Arg):
            if source.ndim not in (0, input.ndim):
                return None
            inputs[source] = source_dims if source.ndim else []
        dims[dim] = Factor(input.shape[dim], unshardable=True)
        sets = [[input, source]] if linear and isinstance(source, Arg) else []
        return local_call(inputs, [dims], linear=sets)

    return here


def _write_along_dim(
    input: Tensor, dim: int, index: Tensor, source: Tensor, accumulate: bool
) -> None:
    """Write at places along a dim; a negative index is out of range."""
    if input.dim() == 0:
        input = input.view(1)
    places: list[Any] = [None] * input.dim()
    numbers = index.reshape(-1)
    places[dim] = torch.where(numbers < 0, numbers - input.shape[dim], numbers)
    put_at_(input, places, source, accumulate)


def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> None:
    _write_along_dim(input, dim, index, _scaled(source, alpha), True)


def _scaled(source: Tensor, alpha: Any) -> Tensor:
    return source if alpha == 1 else (source * alpha).to(source.dtype)


def _index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    _write_along_dim(input, dim, index, source, False)


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> None:
    """Fill places along a dim by mask, which counts a repeated place's gradient once."""
    if input.dim() == 0:
        input = input.view(1)
    mesh = on_mesh(input, index, value)._spec.mesh
    none = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device)
    mask, true = replicated(none, mesh), replicated(none.new_ones(()), mesh)
    put_at_(mask, [index.reshape(-1)], true, False)
    shape = [1] * input.dim()
    shape[dim] = -1
    input.masked_fill_(mask.view(shape), value)


def _index_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> None:
    if input.dim() == 0:
        input, source = input.view(1), source.reshape(1)
    shape = [1] * input.dim()
    shape[dim] = -1
    places = index.reshape(shape).expand(source.shape)
    input.scatter_reduce_(dim, places, source, reduce, include_self=include_self)


for _name, _linear, _write in (
    ("index_add", True, _index_add),
    ("index_copy", True, _index_copy),
    ("index_fill", True, _index_fill),
    ("index_reduce", False, _index_reduce),
):
    register_writer(_name, _index_rule(_linear), _write)
