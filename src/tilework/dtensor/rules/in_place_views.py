"""In-place forms of operators that only change dims: the tensor itself becomes the view."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd.gradients import become, check_no_leaf, show_shape
from tilework.dtensor.base import APART, grads_of, memory_of, own_memory, owner_of
from tilework.dtensor.dispatch.checked_writes import check_in_graph
from tilework.dtensor.dispatch.results import replicated_like
from tilework.dtensor.provenance.digests import digest_of, note_write
from tilework.dtensor.spec import row_major
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.moved_views import (
    check_fresh,
    full_in_memory_order,
    note_start,
    offset_of,
    room_of,
    same_memory,
)
from tilework.dtensor.views.places import count_write
from tilework.tiled import canonical_name, dtensor_handler


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_")
def _changed_dims(func: Any, args: Any, kwargs: Any) -> DTensor:
    """Change the dims of a tensor in place. No element is written, or moved."""
    tensor: DTensor = args[0]
    name = canonical_name(func)[0]
    check_no_leaf(tensor)
    check_in_graph(name, tensor)
    if tensor.requires_grad:
        raise RuntimeError(
            f"{name}_() would change the dims of {tensor!r}, which requires a gradient: write "
            f"x = x.{name}(…), or x.data = x.data.{name}(…) for a leaf"
        )
    if tensor._view_of is not None:
        check_fresh(tensor)
    count_write(tensor)
    local = tensor._local_tensor
    with torch.inference_mode(local.is_inference()), torch.enable_grad():  # for later writes
        result: DTensor = getattr(Tensor, name)(same_memory(tensor, local), *args[1:], **kwargs)
    if own_memory(result).shows is not own_memory(tensor).shows:
        raise RuntimeError(
            f"{name}_() of {tensor!r} would have to move elements between ranks: write "
            f"x = x.{name}(…)"
        )
    memory_of(tensor).room = room_of(tensor)
    start, digest, viewed = offset_of(result), digest_of(result), tensor._viewed
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec.copy()
    grads_of(tensor).forget()
    if viewed is None:
        note_start(tensor, start)
    else:
        func = viewed[2] if viewed[2] is None or viewed[2] in APART else _itself
        tensor._viewed = (viewed[0], viewed[1], func, (), {}, start)
    note_write(tensor, digest)
    show_shape(tensor)
    return tensor


def _itself(x: Any) -> Any:
    return x


@dtensor_handler("resize_")
def _resize_(func: Any, args: Any, kwargs: Any) -> DTensor:
    """Change the shape of a tensor in place, with new memory if the old memory is too small."""
    tensor: DTensor = args[0]
    sizes: Any = args[1:]
    sizes = sizes[0] if sizes and not isinstance(sizes[0], int) else sizes
    shape = tuple(map(int, sizes if args[1:] else kwargs["size"]))
    if tensor.requires_grad:
        raise RuntimeError(
            f"cannot resize variables that require grad, got {tensor!r}: give it other data, with "
            f"x.data = y"
        )
    return _resized(tensor, shape, kwargs.get("memory_format", torch.contiguous_format))


@dtensor_handler("_resize_output_")
def _resize_output_(func: Any, args: Any, kwargs: Any) -> DTensor:
    """Give ``out=`` the shape of the result. The graph does not record that, as in torch."""
    tensor, shape, *_ = args
    return _resized(tensor, tuple(shape))


def _resized(
    tensor: DTensor, shape: tuple[int, ...], memory_format: Any = torch.contiguous_format
) -> DTensor:
    if shape == tuple(tensor.shape):
        return tensor
    if owner_of(tensor).dtype != tensor.dtype:
        raise RuntimeError(
            f"a view of {tensor.dtype} cannot be resized from {list(tensor.shape)} to "
            f"{list(shape)}: it shows a memory of {owner_of(tensor).dtype}: clone() it first"
        )
    start = offset_of(tensor)
    room = max(room_of(tensor) - start, 0)
    if math.prod(shape) <= room and memory_format is torch.contiguous_format:
        return _changed_dims(torch.Tensor.as_strided_, (tensor, shape, row_major(shape), start), {})
    if math.prod(shape) > room > 0 and owner_of(tensor) is not tensor:
        raise RuntimeError(
            f"a view cannot be resized from {list(tensor.shape)} to {list(shape)}: from the view's "
            f"start on, the memory has room for only {room} elements: clone() the view first"
        )
    full = full_in_memory_order(tensor)
    known = full.numel()
    full.resize_(shape, memory_format=memory_format)
    # Otherwise new elements would have whatever each rank's memory happens to hold.
    full.as_strided((full.numel(),), (1,), 0)[known:].zero_()
    return become(tensor, replicated_like(tensor, full))


@dtensor_handler("resize_as_")
def _resize_as_(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, like = args
    return tensor.resize_(like.shape, **kwargs)
