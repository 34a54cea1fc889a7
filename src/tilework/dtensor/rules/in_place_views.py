"""In-place forms of operators that only change dims: the tensor itself becomes the view."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import changed_in_place, local_graph
from tilework.dtensor.base import owner_of
from tilework.dtensor.dispatch.overlapping import check_in_graph
from tilework.dtensor.dispatch.results import replicated_like
from tilework.dtensor.spec import row_major
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.copied_views import anchor_of
from tilework.dtensor.views.memory_layout import full_in_memory_order, offset_of
from tilework.dtensor.views.places import count_write
from tilework.tiled.op_names import canonical_name
from tilework.tiled.op_table import dtensor_handler


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_")
def _changed_dims(func: Any, args: Any, kwargs: Any) -> DTensor:
    """Change the dims of a tensor in place: the tensor becomes a view of what it was before.

    No element is written. Views made before keep showing the memory as before; an anchor stands for
    their base.
    """
    tensor: DTensor = args[0]
    name = canonical_name(func)[0]
    operator = getattr(Tensor, name)
    changed_in_place.check_no_leaf(tensor)
    check_in_graph(name, tensor)
    _check_graph_of_dims(name, tensor)
    rest = args[1:]

    def change(x: Any) -> Any:
        return operator(x, *rest, **kwargs)

    graded = torch.is_grad_enabled()
    with torch.inference_mode(tensor._local_tensor.is_inference()), torch.enable_grad():
        local_graph.local_of(tensor)  # brings it up to date, and links it to a user's Function
        count_write(tensor, graded)
        anchor = anchor_of(tensor)
        result: DTensor = change(anchor)
    if changed_in_place.may_change_local(tensor, result):
        changed_in_place.change_local(
            anchor, result, lambda local: func(local, *rest, **kwargs), change
        )
    return changed_in_place.become_view(tensor, anchor, result)


def _check_graph_of_dims(name: str, tensor: DTensor) -> None:
    """Raise if gradients would be wrong after a change of dims in place. Local.

    Raises:
        RuntimeError: The tensor requires a gradient, and gradients are not recorded; or the tensor
            retains a gradient, which has the dims from before.
    """
    if not tensor.requires_grad:
        return
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}_() would change the dims of {tensor!r}, which requires a gradient, while "
            f"gradients are off: later gradients would belong to other elements. Write "
            f"x.data = x.data.{name}(…), or x = x.{name}(…)"
        )
    if tensor.retains_grad:
        raise RuntimeError(
            f"{name}_() would change the dims of {tensor!r}, whose gradient is retained in the "
            f"dims so far: call {name}_() before retain_grad(), or write x = x.{name}(…)"
        )


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
    room = max(owner_of(tensor).numel() - start, 0)
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
    return changed_in_place.become(tensor, replicated_like(tensor, full))


@dtensor_handler("resize_as_")
def _resize_as_(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, like = args
    return tensor.resize_(like.shape, **kwargs)
