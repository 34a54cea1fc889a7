"""Ranges and single elements of sharded dims: narrow, select, split, diagonal, basic indexing.

A range of a sharded dim stays on the ranks that hold it: the result is unevenly sharded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.dtensor.autograd import local_graph
from tilework.dtensor.autograd.partial_grads import alias
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch.results import full_value
from tilework.dtensor.propagation.op_sharding import DTensorArg, PlacedCall
from tilework.dtensor.provenance.digests import Moved
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import full_in_memory_order, replicated_as
from tilework.layout import Placement, Replicate, Shard
from tilework.layout.internal import SeveralRangesError, infer_splits, shard_of
from tilework.tiled import Arg, Decomposition, RuleResult, dtensor_rule
from tilework.tiled.rules import SPLITS, dim_at, split_lengths, with_item

#: The sizes that shards have afterwards, from their ranges ``(offset, size)`` before.
Resize = Callable[[Sequence[tuple[int, int]]], Sequence[int]]


def with_dims_unsharded(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The same layout with all of these dims on each rank."""
    return spec.with_placements(
        [
            Replicate() if isinstance(placement, Shard) and placement.dim in dims else placement
            for placement in spec.placements
        ],
        spec.order,
    )


def resizable(
    spec: DTensorSpec, resizes: Mapping[int, Resize]
) -> tuple[DTensorSpec, dict[int, Ints | None]]:
    """The layout in which shards of some dims may become longer or shorter where they are.

    ``resizes`` has, for each dim that changes, a function from the old shards to the new sizes. If
    no placement has the new shards of a dim, the dim's innermost axis no longer shards it. Beside
    the layout that the tensor must have first: for each axis that shards one of the dims, the sizes
    of the shards afterwards (None: as ``torch.chunk`` splits).
    """
    sizes: dict[int, Ints | None] = {}
    for dim, resize in resizes.items():
        while (after := _sizes_after(spec, dim, resize)) is None:
            placements: list[Placement] = list(spec.placements)
            placements[spec.axes_of(dim)[-1]] = Replicate()
            spec = spec.with_placements(placements, spec.order)
        sizes.update(after)
    return spec, sizes


def _sizes_after(spec: DTensorSpec, dim: int, resize: Resize) -> dict[int, Ints | None] | None:
    """The sizes of the shards of each axis that shards ``dim``; None if no placement has them."""
    axes = spec.axes_of(dim)
    lengths = [spec.mesh.spec.shape[axis] for axis in axes]
    sizes = infer_splits(resize(spec.shards_of(dim)), lengths)
    return None if sizes is None else dict(zip(axes, sizes, strict=True))


def resized(
    spec: DTensorSpec,
    shape: Sequence[int],
    dims: Mapping[int, int],
    sizes: Mapping[int, Ints | None],
) -> DTensorSpec:
    """The layout of a result that keeps each element where it is.

    ``dims`` has the result's dim for each dim of the tensor that it keeps; ``sizes`` those of
    shards for axes where they have changed, as of :func:`resizable`.
    """
    placements = [
        shard_of(dims[placement.dim], sizes.get(axis, placement.cut))
        if isinstance(placement, Shard)
        else placement
        for axis, placement in enumerate(spec.placements)
    ]
    return spec_of(spec.mesh, placements, shape, spec.order)


def shard_number(spec: DTensorSpec, dim: int) -> tuple[int, int]:
    """The number of this rank's shard among those of a dim, in their order, and how many exist."""
    coordinate = spec.mesh.get_coordinate() or [0] * spec.mesh.ndim
    number, count = 0, 1
    for axis in spec.axes_of(dim):
        length = spec.mesh.shape[axis]
        number, count = number * length + coordinate[axis], count * length
    return number, count


#: An item of basic indexing: a range of a dim, an element of it, or None for a new dim.
Item = slice | int | None


def local_slice(start: int, stop: int, step: int, offset: int, size: int) -> slice:
    """The part of a range of the full dim that lies in a shard of ``size`` from ``offset`` on."""
    # The first element of the range that is not before the shard.
    first = max(start, start + -(-(offset - start) // step) * step)
    end = min(stop, offset + size)
    return slice(first - offset, max(end, first) - offset, step) if first < end else slice(0, 0)


def slice_length(span: slice) -> int:
    """The number of elements of a slice that starts at 0 or later."""
    return len(range(span.start, span.stop, span.step or 1))


def resize_to_range(start: int, stop: int, step: int) -> Resize:
    """A function that gives, for each shard of a dim, the number of the range's elements in it."""
    return lambda shards: [slice_length(local_slice(start, stop, step, *shard)) for shard in shards]


def slice_call(input: DTensorArg, items: Sequence[Item]) -> PlacedCall:
    """The call of basic indexing by the items of all dims; single elements unshard dims."""
    spec, dim = input.spec, 0
    single: list[int] = []
    spans: dict[int, tuple[int, int, int]] = {}
    by_dim: list[tuple[Item, int]] = []
    shape: list[int] = []
    dims: dict[int, int] = {}
    for item in items:
        by_dim.append((item, dim))
        if isinstance(item, slice):
            spans[dim], dims[dim] = item.indices(input.shape[dim]), len(shape)
            shape.append(len(range(*spans[dim])))
        elif item is None:
            shape.append(1)
            continue
        else:
            single.append(dim)
        dim += 1
    if any(spec.splits[dim] for dim in single):  # an axis of one rank shards nothing
        spec = with_dims_unsharded(spec, single)
    changed = {dim: span for dim, span in spans.items() if span != (0, input.shape[dim], 1)}
    resizes = {dim: resize_to_range(*span) for dim, span in changed.items() if spec.axes_of(dim)}
    source, sizes = resizable(spec, resizes)
    here = {dim: local_slice(*span, *source.local_range(dim)) for dim, span in changed.items()}
    index = tuple([
        here.get(dim, slice(None)) if isinstance(item, slice) else item for item, dim in by_dim
    ])  # fmt: skip
    return PlacedCall([source], [resized(source, shape, dims, sizes)], lambda x: x[index])


def basic_index_call(input: DTensorArg, items: Sequence[Item]) -> RuleResult:
    """The call of basic indexing; single elements of sharded dims are taken as ranges of one."""
    ranges, single = _ranges(input, items)
    part = slice_call(input, ranges)
    if not single:
        return part
    (spec,) = part.outputs
    whole = with_dims_unsharded(spec, single)
    kept = [dim for dim in range(spec.ndim) if dim not in single]
    shape = [spec.shape[dim] for dim in kept]
    out = resized(whole, shape, {dim: i for i, dim in enumerate(kept)}, {})
    first = tuple([0 if dim in single else slice(None) for dim in range(spec.ndim)])

    def run(local: Tensor) -> Tensor:
        of = Moved(provenance_digest.digest(), "indexing")
        moved = redistribute_local(part.run(local), spec, whole, of=of)
        if causes.watchers:
            causes.tag_gradient(moved)
        return moved[first]

    axes = tuple([axis for dim in single for axis in spec.axes_of(dim)])
    index, put = tuple(items), _put(part.run, single, len(kept))

    def write(x: DTensor, value: DTensor) -> None:
        if part.inputs[0] != x._spec:
            put_range_(x, index, value)
            return
        put(x._local_tensor, alias(value, axes))
        local_graph.wrote(x, "a view")

    return PlacedCall(part.inputs, [out], run, write=write)


def _ranges(input: Arg, items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """The items, with ranges of one element in sharded dims, and the result's dims for these."""
    ranges: list[Item] = []
    single: list[int] = []
    dim = out = 0
    for item in items:
        if isinstance(item, int) and input.is_sharded(dim):
            at = item % input.shape[dim]
            item = slice(at, at + 1)
            single.append(out)
        ranges.append(item)
        dim += item is not None
        out += not isinstance(item, int)
    return ranges, single


def as_ranges(input: DTensor, items: Sequence[Item]) -> tuple[Item, ...]:
    """The items with ranges of one element for single elements of sharded dims."""
    return tuple(_ranges(DTensorArg(0, input._spec, input.dtype), items)[0])


def _put_range_rule(input: DTensorArg, items: Sequence[Item], value: DTensorArg) -> RuleResult:
    """Each rank writes to the part that it has, and the value is there in the same layout."""
    ranges, single = _ranges(input, items)
    try:
        call = slice_call(input, ranges)
    except SeveralRangesError:
        return Decomposition(_put_gathered)
    if call.inputs[0] != input.spec:
        return Decomposition(_put_gathered)
    (target,) = call.outputs
    kept = [dim for dim in range(target.ndim) if dim not in single]
    if value.ndim > len(kept):
        return None  # torch refuses it
    dims = {
        dim: i
        for i, dim in enumerate(kept, value.ndim - len(kept))
        if i >= 0 and value.shape[i] == target.shape[dim]
    }
    placements: list[Placement] = []
    partial: list[int] = []
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            if placement.dim not in dims:
                partial.append(axis)
                placement = Replicate()
            else:
                placement = shard_of(dims[placement.dim], placement.cut)
        placements.append(placement)
    needed = spec_of(target.mesh, placements, value.shape, target.order)

    put = _put(call.run, single, len(kept))
    return PlacedCall([input.spec, needed], [input.spec], put, [(), tuple(partial)])


def _put(
    part: Callable[[Tensor], Tensor], single: Sequence[int], ndim: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that writes a local value of at most ``ndim`` dims to ranges of a local tensor.

    ``part`` makes the view of these ranges, of which the value lacks the dims ``single``.
    """

    def put(x: Tensor, value: Tensor) -> Tensor:
        value = value[(None,) * (ndim - value.dim())]
        for dim in single:
            value = value.unsqueeze(dim)
        with torch.autograd.grad_mode._force_original_view_tracking(True):  # as OnLocals.replays
            target = part(x)
        target.copy_(value)
        return x

    return put


def _put_gathered(input: DTensor, items: Sequence[Item], value: Tensor) -> DTensor:
    full = full_in_memory_order(input)
    full[tuple(items)] = full_value(value, "x[range] = value")
    return replicated_as(input, full)


@internal_operator(_put_range_rule)
def put_range_(input: Tensor, items: Sequence[Item], value: Tensor) -> Tensor:
    """``input[items] = value``, where each item is a range or an element of a dim, or None."""
    input[tuple(items)] = value
    return input


def basic_items(index: Any, shape: Sequence[int]) -> list[Item] | None:
    """The item of each dim; None if this is not basic indexing, or does not fit the shape."""
    items_given = list(index) if isinstance(index, tuple) else [index]
    count = sum(item is not None and item is not Ellipsis for item in items_given)
    if count > len(shape) or sum(item is Ellipsis for item in items_given) > 1:
        return None
    if not any(item is Ellipsis for item in items_given):
        items_given.append(Ellipsis)
    at = next(i for i, item in enumerate(items_given) if item is Ellipsis)
    items_given[at : at + 1] = [slice(None)] * (len(shape) - count)
    items: list[Item] = []
    dim = 0
    for item in items_given:
        if item is None:
            items.append(None)
            continue
        known = _item(item, shape[dim])
        if known is None:
            return None
        items.append(known)
        dim += 1
    return items


def _item(item: Any, size: int) -> Item:
    """A range or an element of a dim; None for any other item."""
    if isinstance(item, slice):
        step = 1 if item.step is None else operator.index(item.step)
        return slice(*slice(item.start, item.stop, item.step).indices(size)) if step > 0 else None
    if isinstance(item, bool) or not hasattr(type(item), "__index__") or isinstance(item, Arg):
        return None
    if isinstance(item, Tensor) or not -size <= operator.index(item) < size:
        return None
    return operator.index(item)


# -- rules -----------------------------------------------------------------------------------


def _full_slices(ndim: int) -> list[Any]:
    """Items that take the whole of each dim."""
    return [slice(None)] * ndim


@dtensor_rule("narrow", is_view=True)
def _narrow(input: DTensorArg, dim: int, start: Any, length: int) -> RuleResult:
    if isinstance(start, Arg):
        is_whole = not (start.dtype.is_floating_point or start.dtype.is_complex)
        if not is_whole or start.dtype == torch.bool or start.ndim:
            return None
        return Decomposition(
            lambda input, dim, start, length: input.narrow(dim, int(start.item()), length)
        )
    size = input.shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        return None
    return slice_call(
        input, with_item(_full_slices(input.ndim), dim, slice(start, start + length, 1))
    )


@dtensor_rule("slice", is_view=True)
def _slice(
    input: DTensorArg, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> RuleResult:
    if not input.ndim or step < 1 or any(isinstance(each, Arg) for each in (start, end)):
        return None
    span = slice(*slice(start, end, step).indices(input.shape[dim]))
    return slice_call(input, with_item(_full_slices(input.ndim), dim, span))


@dtensor_rule("select", is_view=True)
def _select(input: DTensorArg, dim: int, index: Any) -> RuleResult:
    if isinstance(index, Arg):
        return Decomposition(lambda input, dim, index: input.select(dim, int(index.item())))
    if not -input.shape[dim] <= index < input.shape[dim]:
        return None
    return basic_index_call(input, with_item(_full_slices(input.ndim), dim, operator.index(index)))


def _with_lengths_as_lists(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``operator`` with lists in place of tensors of lengths."""

    def as_list(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return full_value(value, "a tensor of lengths").tolist()

    def compute(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {name: as_list(value) for name, value in kwargs.items()}
        return operator(input, *map(as_list, args), **named)

    return compute


def _consecutive_ranges(
    input: Tensor, dim: int, lengths: Sequence[int], together: bool
) -> tuple[Tensor, ...]:
    """Consecutive ranges of a dim; ``together`` is True if torch's graph has one node for all."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(input.narrow(dim, start, length))
        start += length
    if together:
        moved_views.made_together(pieces)
    return tuple(pieces)


def _register_split(name: str) -> None:
    @dtensor_rule(name)
    def split_rule(input: DTensorArg, *args: Any, **kwargs: Any) -> RuleResult:
        lengths = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Arg)]
        if any(arg.dtype is not torch.int64 for arg in lengths):
            return None  # torch raises when the call runs
        if lengths:
            return Decomposition(_with_lengths_as_lists(getattr(Tensor, name)))
        split = split_lengths(name, input, args, kwargs)
        if split is None or not input.spec.axes_of(split[0]):
            return None
        together = name in moved_views.TOGETHER
        return Decomposition(lambda input, *_, **__: _consecutive_ranges(input, *split, together))


for _name in SPLITS:
    _register_split(_name)


# -- diagonals -------------------------------------------------------------------------------


@dtensor_rule("linalg_diagonal", is_view=True)
def _linalg_diagonal(
    A: DTensorArg, *, offset: Any = 0, dim1: int = -2, dim2: int = -1
) -> RuleResult:
    return _diagonal(A, offset, dim1, dim2)


@dtensor_rule("diagonal", is_view=True)
def _diagonal(
    input: DTensorArg, offset: Any = 0, dim1: int = 0, dim2: int = 1, **_: Any
) -> RuleResult:
    dim1, dim2 = dim_at(dim1, input.ndim), dim_at(dim2, input.ndim)
    if not isinstance(offset, int) or dim1 == dim2:
        return None
    rows, columns = input.shape[dim1], input.shape[dim2]
    start, stop = max(0, -offset), max(min(rows, columns - offset), max(0, -offset))
    # One of the two dims may stay sharded, but not the other.
    along, other = (
        (dim1, dim2) if input.is_sharded(dim1) or not input.is_sharded(dim2) else (dim2, dim1)
    )
    shift = 0 if along == dim1 else offset
    source, sizes = resizable(
        with_dims_unsharded(input.spec, [other]),
        {along: resize_to_range(start + shift, stop + shift, 1)},
    )
    kept = [dim for dim in range(input.ndim) if dim not in (dim1, dim2)]
    dims = {dim: i for i, dim in enumerate(kept)} | {along: len(kept)}
    shape = [*(input.shape[dim] for dim in kept), stop - start]
    here = offset + source.local_range(dim1)[0] - source.local_range(dim2)[0]
    out = resized(source, shape, dims, sizes)
    return PlacedCall([source], [out], lambda x: x.diagonal(here, dim1, dim2))
