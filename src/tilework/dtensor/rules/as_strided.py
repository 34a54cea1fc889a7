"""Views by strides, of the memory that the tensor would have if it were plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import owner_of
from tilework.dtensor.dispatch.results import call_with_out, full_value
from tilework.dtensor.propagation.strides import storage_of
from tilework.dtensor.rules.index_read import as_replicated
from tilework.dtensor.rules.scatter import check_source
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.memory_layout import (
    Window,
    full_memory,
    offset_of,
    replicated_as,
    root_in_memory,
    window_of,
    write_memory,
)
from tilework.layout import Replicate
from tilework.tiled.op_table import dtensor_handler


def _arguments(
    input: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> tuple[DTensor, Window]:
    if input._view_of is not None:
        copied_views.refresh(input)
    offset = offset_of(input) if storage_offset is None else int(storage_offset)
    if input._spec.overlaps:  # a write would change several elements at once
        base, apart = copied_views.shown_of(input)
        input = base.detach() if apart else base  # type: ignore[assignment]
    window = Window(tuple(map(int, size)), tuple(map(int, stride)), offset)
    _check_bounds(input, window)
    return input, window


def _check_bounds(input: DTensor, window: Window) -> None:
    """Raise, on all ranks, if the window reaches past the memory that the full tensor would have.

    torch would only check the local memory, which may be larger.
    """
    owner = owner_of(input)
    room = Window(owner._spec.shape, owner._spec.strides, 0).stop
    room = room * owner.dtype.itemsize // input.dtype.itemsize
    if window.stop > room:
        raise RuntimeError(
            f"as_strided with size {list(window.size)}, stride {list(window.strides)} and offset "
            f"{window.offset} needs a memory of {window.stop} elements, but the tensor has {room}"
        )


@dtensor_handler("as_strided")
def _as_strided(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``as_strided`` of a DTensor.

    The result shares the memory if each rank has the whole tensor. Otherwise the result is a copy
    that tilework updates after writes.
    """
    input, window = _arguments(*args, **kwargs)
    mesh = input.device_mesh
    spec = spec_of(mesh, (Replicate(),) * mesh.ndim, window.size, None, window.strides)
    start = _local_start(input)
    if start is not None:
        local = input._local_tensor.as_strided(window.size, window.strides, start + window.offset)
        return copied_views.viewed(  # type: ignore[no-any-return]
            wrap(local, spec), False, torch.as_strided, (input, *window), {}
        )

    def shown(x: DTensor) -> DTensor:
        return wrap(window.of(full_memory(x)), spec)

    def redo(x: DTensor) -> DTensor:
        return shown(root_in_memory(x))  # type: ignore[arg-type]

    def write(x: DTensor, value: DTensor) -> None:
        x = root_in_memory(x)  # type: ignore[assignment]  # the root has all of the memory
        memory = full_memory(x)
        memory = memory.clone() if memory.requires_grad else memory
        window.of(memory).copy_(value.full_tensor())
        write_memory(x, memory)

    result = shown(input)
    copied_views.mark(result, input, redo, write)
    anchor, its_spec, *_ = result._viewed  # type: ignore[misc]
    result._viewed = (anchor, its_spec, torch.as_strided, (input, *window), {})
    return result


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
    return int(local.storage_offset())


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
    base, window = _arguments(**rest)
    check_source(src, window.size)
    memory = full_memory(base).clone()
    window.of(memory).copy_(full_value(src, "as_strided_scatter"))
    result = replicated_as(input, window_of(input).of(memory))
    result._spec = result._spec.with_strides(input._spec.strides)
    return result
