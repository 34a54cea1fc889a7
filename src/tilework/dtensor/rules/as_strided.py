"""Views by strides, of the memory that the tensor would have if it were plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import owner_of
from tilework.dtensor.dispatch.results import call_with_out, full_value
from tilework.dtensor.propagation.strides import is_dense, storage_of
from tilework.dtensor.rules.index_read import as_replicated
from tilework.dtensor.rules.scatter import check_source
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import (
    Window,
    full_in_memory_order,
    offset_of,
    replicated_as,
    room_of,
)
from tilework.layout import Replicate
from tilework.tiled import dtensor_handler


def _window(
    input: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Window:
    """The window that a view by strides shows.

    Raises:
        RuntimeError: On all ranks: it reaches past the memory that the full tensor would have.
            torch would only check the local memory, which may be larger.
    """
    if input._view_of is not None:
        moved_views.check_fresh(input)
    offset = offset_of(input) if storage_offset is None else int(storage_offset)
    window = Window(tuple(map(int, size)), tuple(map(int, stride)), offset)
    room = room_of(input) * owner_of(input).dtype.itemsize // input.dtype.itemsize
    if window.stop > room:
        raise RuntimeError(
            f"as_strided with size {list(window.size)}, stride {list(window.strides)} and offset "
            f"{window.offset} needs a memory of {window.stop} elements, but the tensor has {room}"
        )
    return window


@dtensor_handler("as_strided")
def _as_strided(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``as_strided`` of a DTensor.

    The result shares the memory if each rank has the whole tensor. Otherwise the elements are
    moved, and must be elements of the tensor itself.
    """
    window = _window(*args, **kwargs)
    input: DTensor = args[0] if args else kwargs["input"]
    mesh = input.device_mesh
    spec = spec_of(mesh, (Replicate(),) * mesh.ndim, window.size, None, window.strides)
    start = _local_start(input)
    if start is not None:
        local = input._local_tensor.as_strided(window.size, window.strides, start + window.offset)
        return moved_views.viewed(  # type: ignore[no-any-return]
            wrap(local, spec), False, torch.as_strided, (input, *window), {}
        )
    within = _within(input, window)
    result = wrap(within.of(full_in_memory_order(input)), spec)
    moved_views.mark(result, input, lambda x: _shown(x, within, spec))
    assert result._viewed is not None
    base, its_spec, _, _, _, before = result._viewed
    result._viewed = (base, its_spec, torch.as_strided, (input, *window), {}, before)
    return result


def _shown(x: Any, within: Window, spec: Any) -> Any:
    """The elements in a window of a dense tensor: of a full one, or of a DTensor (collective)."""
    if not isinstance(x, DTensor):
        return within.of(x)
    return wrap(within.of(full_in_memory_order(x)), spec)


def _within(input: DTensor, window: Window) -> Window:
    """A window in the memory of a tensor, seen from where the tensor begins.

    Raises:
        RuntimeError: The window shows elements that the tensor does not.
    """
    spec, start = input._spec, window.offset - offset_of(input)
    if (
        not is_dense(spec.shape, spec.strides)
        or start < 0
        or window.stop > (window.offset - start + input.numel())
    ):
        raise RuntimeError(
            f"as_strided of {input!r} with size {list(window.size)}, stride "
            f"{list(window.strides)} and offset {window.offset} shows elements of the memory that "
            f"the tensor does not, and they lie on several ranks: call it on the tensor that has "
            f"them, or on a clone()"
        )
    return window._replace(offset=start)


def _local_start(input: DTensor) -> int | None:
    """The offset in the local storage at which the full tensor's memory begins.

    Returns:
        None if the rank does not have the whole tensor in the full tensor's strides.
    """
    owner = owner_of(input)
    spec, local = owner._spec, owner._local_tensor
    whole = spec.is_replicated and not spec.partial_axes and input._spec.is_replicated
    if not whole or tuple(local.stride()) != spec.strides:
        return None
    if storage_of(local) != storage_of(input._local_tensor):
        return None
    return int(local.storage_offset()) - offset_of(owner)


@dtensor_handler("as_strided_copy")
def _as_strided_copy(func: Any, args: Any, kwargs: Any) -> Tensor:
    if kwargs.get("out") is not None:
        return call_with_out("as_strided_copy", func, args, dict(kwargs))  # type: ignore[no-any-return]
    return _as_strided(torch.as_strided, args, kwargs).clone(memory_format=torch.contiguous_format)


@dtensor_handler("as_strided_scatter")
def _as_strided_scatter(func: Any, args: Any, kwargs: Any) -> DTensor:
    """A copy of the tensor, with ``src`` in the elements that ``as_strided`` would show."""
    names = ("input", "src", "size", "stride", "storage_offset")
    rest = {**dict(zip(names, args, strict=False)), **kwargs}
    src = rest.pop("src")
    if not isinstance(rest["input"], DTensor):
        return as_replicated(func(**{**rest, "src": full_value(src, "as_strided_scatter")}), src)
    if rest["input"]._spec.repeats:  # torch then copies the elements, and otherwise the memory
        rest["input"] = rest["input"].clone()
    input: DTensor = rest["input"]
    within = _within(input, _window(**rest))
    check_source(src, within.size)
    full = full_in_memory_order(input)
    within.of(full).copy_(full_value(src, "as_strided_scatter"))
    result = replicated_as(input, full)
    result._spec = result._spec.with_strides(input._spec.strides)
    return result
