"""Ranges and single elements of dims: narrow, select, split, unbind, and indexing.

Each tile becomes a part of the range, on the same rank; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tilework.layout import Box
from tilework.layout.internal import Ints
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.by_tile import elementwise
from tilework.sharded.ops.tiles import (
    ResultLayout,
    boxes_of,
    cached,
    dims_of,
    graph_tiles,
    layout_of_boxes,
    of_tiles,
    options_of,
    sharded_argument,
    wrap,
)
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import within

# -- ranges and elements ---------------------------------------------------------------------


def _without(numbers: Sequence[int], dim: int) -> Ints:
    return (*numbers[:dim], *numbers[dim + 1 :])


def _with(numbers: Sequence[int], dim: int, value: int) -> Ints:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def alias(tensor: ShardedTensor) -> ShardedTensor:
    """A tensor that shares the tensor's tiles."""
    return wrap(tensor, [tile.view_as(tile) for tile in graph_tiles(tensor)])


def narrow(tensor: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    """``length`` elements along a dim, from ``start``; tiles outside become empty."""

    def make() -> ResultLayout:
        boxes = []
        for box in boxes_of(tensor):
            begin, count = within(box, dim, start, length)
            boxes.append(Box(_with(box.offsets, dim, begin), _with(box.sizes, dim, count)))
        return layout_of_boxes(tensor, _with(tensor.shape, dim, length), boxes)

    layout = cached(tensor, ("narrow", dim, start, length), make)
    parts = []
    for tile, box in zip(tensor.local_tiles(), tensor.local_boxes(), strict=True):
        begin, count = within(box, dim, start, length)
        first = begin + start - box.offsets[dim]
        parts.append(tile.narrow(dim, min(max(first, 0), box.sizes[dim]), count))
    return of_tiles(tensor, layout, parts)


def select(tensor: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    """The element at an index of a dim, without the dim; ranks without it hold no shards."""

    def has(box: Box) -> bool:
        return box.offsets[dim] <= index < box.ends[dim]

    def make() -> ResultLayout:
        boxes = [
            Box(_without(box.offsets, dim), _without(box.sizes, dim)) if has(box) else None
            for box in boxes_of(tensor)
        ]
        return layout_of_boxes(tensor, _without(tensor.shape, dim), boxes)

    parts = [
        tile.select(dim, index - box.offsets[dim]) if has(box) else None
        for tile, box in zip(tensor.local_tiles(), tensor.local_boxes(), strict=True)
    ]
    return of_tiles(tensor, cached(tensor, ("select", dim, index), make), parts)


# -- torch's functions -------------------------------------------------------------------------


def _meta(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")


def _splits(func: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        options = options_of(("how", "dim"), args, kwargs)
        (dim,) = dims_of(tensor, options.pop("dim", 0)) or (0,)
        options.pop("input", None), options.pop("self", None)
        how = [options.pop("how")] if "how" in options else []
        start, parts = 0, []
        for part in func(_meta(tensor.shape), *how, dim=dim, **options):
            parts.append(narrow(tensor, dim, start, part.shape[dim]))
            start += part.shape[dim]
        return tuple(parts)

    return handler


def _narrow(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = sharded_argument(torch.narrow, args, kwargs)
    options = options_of(("dim", "start", "length"), args, kwargs)
    (dim,) = dims_of(tensor, options["dim"]) or (0,)
    start, length = int(options["start"]), int(options["length"])
    _meta(tensor.shape).narrow(dim, start, length)  # raises what torch raises
    return narrow(tensor, dim, start % max(tensor.shape[dim], 1) if start < 0 else start, length)


def _select(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = sharded_argument(torch.select, args, kwargs)
    options = options_of(("dim", "index"), args, kwargs)
    (dim,) = dims_of(tensor, options["dim"]) or (0,)
    index = int(options["index"])
    _meta(tensor.shape).select(dim, index)
    return select(tensor, dim, index % tensor.shape[dim])


def _unbind(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = sharded_argument(torch.unbind, args, kwargs)
    (dim,) = dims_of(tensor, options_of(("dim",), args, kwargs).get("dim", 0)) or (0,)
    return tuple(select(tensor, dim, i) for i in range(tensor.shape[dim]))


def _squeeze(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = sharded_argument(torch.squeeze, args, kwargs)
    dim = options_of(("dim",), args, kwargs).get("dim")
    # An empty list means no dims here, but all dims for a reduction.
    dims = () if isinstance(dim, tuple | list) and not dim else dims_of(tensor, dim)
    tensor = alias(tensor)
    for dim in reversed(range(tensor.dim()) if dims is None else dims):
        if tensor.shape[dim] == 1:
            tensor = select(tensor, dim, 0)
    return tensor


def _by_dim(shape: torch.Size, key: Any) -> tuple[Any, ...] | None:
    """An index with a number or slice for each dim, and None for new ones; None for other keys."""
    keys = key if isinstance(key, tuple) else (key,)
    if not {*map(type, keys)} <= {int, slice, type(None), type(...)} or keys.count(...) > 1:
        return None
    _meta(shape)[key]  # raises what torch raises
    at = keys.index(...) if ... in keys else len(keys)
    spread = [slice(None)] * (len(shape) - len(keys) + keys.count(None) + keys.count(...))
    return (*keys[:at], *spread, *keys[at + 1 :])


def _index(tensor: ShardedTensor, key: Any) -> ShardedTensor | None:
    """``tensor[key]`` for numbers, slices, None and an ellipsis; None for other keys."""
    keys = _by_dim(tensor.shape, key)
    if keys is None:
        return None
    tensor, dim = alias(tensor), 0
    for k in keys:
        if k is None:
            tensor = cast(ShardedTensor, tensor.unsqueeze(dim))
        elif isinstance(k, int):
            tensor = select(tensor, dim, k % tensor.shape[dim])
            continue
        elif k != slice(None):
            start, stop, step = k.indices(tensor.shape[dim])
            if step != 1:
                return None
            tensor = narrow(tensor, dim, start, max(stop - start, 0))
        dim += 1
    return tensor


_INDEX = "by numbers, slices of step 1, None and an ellipsis; or index the local shards"


def _getitem(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = sharded_argument(Tensor.__getitem__, args, kwargs)
    part = _index(tensor, args[1])
    if part is None:
        raise unsupported(Tensor.__getitem__, args, kwargs, _INDEX)
    return part


def _setitem(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor = sharded_argument(Tensor.__setitem__, args, kwargs)
    if isinstance(args[1], ShardedTensor) and args[1].dtype == torch.bool:
        elementwise(Tensor.masked_fill_)(types, args, kwargs, process_group)
        return
    part, value = _index(tensor, args[1]), args[2]
    if part is None:
        raise unsupported(Tensor.__setitem__, args, kwargs, _INDEX)
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        # Only some ranks would have the value in the tensor's graph.
        raise unsupported(Tensor.__setitem__, args, kwargs, "use where(), or detach() the value")
    write = Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_
    elementwise(write)(types, (part, value), {}, process_group)


def _both(name: str) -> list[Callable[..., Any]]:
    functions = (getattr(space, name, None) for space in (torch, Tensor))
    return [func for func in functions if func is not None]


_SPLITTING = ("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
_DIM_BY_DIM = {"narrow": _narrow, "select": _select, "unbind": _unbind, "squeeze": _squeeze}

TABLE: dict[Callable[..., Any], Handler] = {
    **{f: _splits(f) for name in _SPLITTING for f in _both(name)},
    **{f: handler for name, handler in _DIM_BY_DIM.items() for f in _both(name)},
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.__iter__: lambda *call: iter(_unbind(*call)),
}
