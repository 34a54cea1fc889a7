"""In-place forms of operators that only change dims: the tensor itself becomes the view."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd.gradients import check_no_leaf, show_shape
from tilework.dtensor.base import APART, grads_of, own_memory
from tilework.dtensor.dispatch.checked_writes import check_in_graph
from tilework.dtensor.provenance.digests import digest_of, note_write
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.moved_views import (
    check_fresh,
    offset_of,
    same_memory,
)
from tilework.dtensor.views.places import count_write
from tilework.tiled import canonical_name, dtensor_handler


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_")
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
    start, digest, viewed = offset_of(result), digest_of(result), tensor._viewed
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec.copy()
    grads_of(tensor).forget()
    if viewed is not None:
        func = viewed[2] if viewed[2] is None or viewed[2] in APART else _itself
        tensor._viewed = (viewed[0], viewed[1], func, (), {}, start)
    note_write(tensor, digest)
    show_shape(tensor)
    return tensor


def _itself(x: Any) -> Any:
    return x
