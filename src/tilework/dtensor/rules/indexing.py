"""``x[index]`` and ``x[index] = value`` of every kind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tilework.dtensor.base import memory_of
from tilework.dtensor.dispatch.checked_writes import check_windows, check_writable
from tilework.dtensor.dispatch.results import full_value
from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.rules.index_read import as_replicated, take_at
from tilework.dtensor.rules.index_write import no_local_rule, on_mesh, put_at_, register_writer
from tilework.dtensor.rules.slicing import (
    Item,
    as_ranges,
    basic_index_call,
    basic_items,
    put_range_,
)
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.moved_views import window_after
from tilework.tiled import Arg, Decomposition, RuleResult, composed, dtensor_rule


@dtensor_rule("__getitem__", is_view=True)
def _getitem(input: DTensorArg, index: Any) -> RuleResult:
    items = basic_items(index, input.shape)
    if items is not None:
        return basic_index_call(input, items)
    return Decomposition(_get_by_tensors if _is_simple_index(index) else _get)


def _is_simple_index(index: Any) -> bool:
    """True if there are only tensors of integers, and full slices."""
    return all(
        (isinstance(item, Arg) and item.ndim > 0 and item.dtype is torch.int64)
        or (isinstance(item, slice) and item == slice(None))
        for item in (index if isinstance(index, tuple) else (index,))
    )


def _get_by_tensors(input: Tensor, index: Any) -> Tensor:
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > input.dim():
        raise IndexError(f"too many indices for tensor of dimension {input.dim()}")
    indices = [_beside(input, item) if isinstance(item, Tensor) else None for item in items]
    return take_at(input, indices + [None] * (input.dim() - len(items)))


def _get(input: Tensor, index: Any) -> Tensor:
    basic, indices = _split(on_mesh(input, index), index)
    return basic if indices is None else take_at(basic, indices)


@dtensor_rule("__setitem__")
@composed
def _set(input: DTensor, index: Any, value: Any) -> None:
    if not isinstance(value, (Tensor, int, float, complex)):  # torch refuses most other values
        torch.zeros(1, dtype=input.dtype)[0] = value
    if index is False:  # torch writes nothing, and the value gets no gradient
        return
    items = basic_items(index, input.shape)
    if items is not None:
        _set_range(input, items, value)
        return
    if _shares_memory(input, value):
        value = value.clone()
    if isinstance(value, Tensor):
        value = _without_leading_ones(value)
    mask = _only_mask(input, index)
    if mask is not None and _is_scalar(value):
        input.masked_fill_(mask, value)
        return
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=input.dtype, device=input.device)
    _put(input, index, value.to(input.dtype) if index is True else value)


def _put(input: DTensor, index: Any, values: Tensor, accumulate: bool = False) -> None:
    basic, indices = _split(input, index)
    if indices is None:
        basic.copy_(basic + values if accumulate else values)
        return
    if not values.dim():
        values = _beside(input, values)
    if values.dtype != input.dtype:  # torch refuses it
        torch.zeros(1, dtype=input.dtype)[torch.tensor([0])] = torch.zeros(1, dtype=values.dtype)
    put_at_(basic, indices, values, accumulate)


def _index_put(input: Any, indices: Any, values: Tensor, accumulate: bool = False) -> None:
    _put(input, _as_index(indices), values, accumulate)


def _as_index(indices: Any) -> tuple[Any, ...]:
    return tuple([slice(None) if index is None else index for index in indices])


dtensor_rule("index")(composed(lambda input, indices: input[_as_index(indices)]))
register_writer("index_put", no_local_rule, _index_put)


def _set_range(input: DTensor, items: list[Item], value: Any) -> None:
    """Write to ranges: each rank writes its shard; an element is a range of one."""
    if not isinstance(value, Tensor):
        _fill(input[as_ranges(input, items)], value)
        return
    _check_apart(input, items, value)
    if _shares_memory(input, value):  # x[1] += 1 writes a view of x to x
        value = value.clone()
    extra = value.dim() - sum(not isinstance(item, int) for item in items)
    if extra > 0 and all(size == 1 for size in value.shape[:extra]):
        value = value.reshape(value.shape[extra:])
    put_range_(input, tuple(items), value)


def _check_apart(input: DTensor, items: list[Item], value: Any) -> None:
    """Raise, as torch does, if a value overlaps the memory that it is written to."""
    if not _shares_memory(input, value) or not value.dim():
        return
    target = window_after(input, lambda x: x[tuple(items)])

    def as_read(x: Tensor) -> Tensor:
        return x if x.shape == target.size else _without_leading_ones(x).expand(target.size)

    check_windows("x[range] = value", target, window_after(value, as_read))


def _without_leading_ones(value: Tensor) -> Tensor:
    """The value without leading dims of size 1, which torch drops before it broadcasts."""
    ones = next((dim for dim, size in enumerate(value.shape) if size != 1), value.dim())
    return value.reshape(value.shape[ones:]) if ones else value


def _fill(target: Tensor, value: Any) -> None:
    check_writable("x[range] = value", target, (value,))
    if isinstance(value, (bool, int, float, complex)):
        target.fill_(value)
    else:
        target.copy_(torch.as_tensor(value, dtype=target.dtype))


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """True if both tensors show the same memory: all ranks agree, unlike for local memory."""
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return False
    return memory_of(tensor) is memory_of(other)


def _only_mask(input: DTensor, index: Any) -> Tensor | None:
    """The mask that is the whole index, with dims of size 1 to the input's ndim; else None."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, Tensor) or index.dtype is not torch.bool or index.dim() == 0:
        return None
    if index.shape != input.shape[: index.dim()]:
        return None
    mask = _beside(input, index)
    return mask.reshape(tuple(mask.shape) + (1,) * (input.dim() - mask.dim()))


def _beside(input: Tensor, other: Tensor) -> Tensor:
    """An index or number on the input's device; beside a meta tensor it stays on the CPU."""
    stays = not other.is_cpu or input.is_cpu or input.is_meta
    return other if stays else other.to(input.device)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) or (
        isinstance(value, Tensor) and value.dim() == 0
    )


# -- indices of every kind -------------------------------------------------------------------


def _split(input: DTensor, index: Any) -> tuple[Tensor, list[Any] | None]:
    """The result of basic indexing, and the index tensor of each dim (None: no tensors at all)."""
    first: list[Any] = []
    then: list[Any] = []
    dim = 0
    for item in _items(input, index):
        if item is None or isinstance(item, bool):
            first.append(None)
            then.append(None if item is None else _bool_index(item, input))
            continue
        if isinstance(item, Tensor):
            places = _integer_indices(item, input, input.shape[dim : dim + _dims_indexed(item)])
            first += [slice(None)] * len(places)
            then += [_beside(input, place) for place in places]
            dim += len(places)
            continue
        _check(item, dim, input.shape[dim])
        first.append(item)
        if isinstance(item, slice):
            then.append(None)
        dim += 1
    basic = input
    if any(item != slice(None) for item in first):
        basic = cast(DTensor, input[tuple(first)])
    return basic, then if any(place is not None for place in then) else None


def _items(input: DTensor, index: Any) -> list[Any]:
    """The items of an index, with full ranges in place of the ellipsis, or at the end."""
    items = [_tensor_of(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = sum(_dims_indexed(item) for item in items)
    if used > input.dim():
        raise IndexError(f"too many indices for tensor of dimension {input.dim()}")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (input.dim() - used)
    return items


def _check(item: Any, dim: int, size: int) -> None:
    if isinstance(item, slice):
        if item.step is not None and operator.index(item.step) <= 0:
            raise ValueError(f"step must be greater than zero, got {item.step} for dim {dim}")
    elif not -size <= item < size:
        raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")


def _tensor_of(item: Any) -> Any:
    """An item as a number, a range, None, Ellipsis, True, False, or a tensor with dims."""
    if item is None or item is Ellipsis or isinstance(item, (bool, slice)):
        return item
    if not isinstance(item, Tensor):
        if hasattr(type(item), "__index__"):
            return operator.index(item)
        if not isinstance(item, Sequence) or isinstance(item, str | bytes):
            kind = TypeError if isinstance(item, str | bytes) else IndexError
            raise kind(
                f"an index is a whole number, a slice, None, Ellipsis, a tensor or a list, got "
                f"{item!r}"
            )
        item = torch.as_tensor(item)
        if item.dtype.is_floating_point:  # an empty list, or numbers that torch rounds down
            item = item.long()
    if item.dim() == 0:
        if item.dtype.is_floating_point or item.dtype.is_complex:
            raise IndexError(
                f"tensors used as indices must be whole numbers or masks, got {item!r}"
            )
        value = full_value(item, "an index").item()
        return value if item.dtype is not torch.uint8 else bool(value)
    return item


def _dims_indexed(item: Any) -> int:
    """The number of dims of the tensor that an item of an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and _is_mask(item) else 1


def _is_mask(item: Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)


def _bool_index(value: bool, like: DTensor) -> Tensor:
    """The index tensor for True or False in an index, which adds a dim of size 1 or 0."""
    return as_replicated(torch.zeros(int(value), dtype=torch.long, device=like.device), like)


def _integer_indices(item: Tensor, like: DTensor, sizes: Any) -> list[Tensor]:
    """The tensors of integers, one for each indexed dim, that a tensor in an index stands for."""
    if not _is_mask(item):
        if item.dtype not in (torch.int64, torch.int32):
            raise IndexError(
                f"tensors used as indices are of int64 or int32, or masks, not {item.dtype}"
            )
        return [item]
    if tuple(item.shape) != tuple(sizes):
        raise IndexError(
            f"The shape of the mask {list(item.shape)} does not match the shape of the indexed "
            f"tensor {list(sizes)}"
        )
    places = full_value(item, "a mask").nonzero(as_tuple=True)
    return [as_replicated(each, like) for each in places]
