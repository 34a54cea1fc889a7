"""Forms in place of operators that only change dims: the tensor itself becomes the view."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import gradients, local_graph
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.tiled.op_names import canonical_name
from tilework.tiled.op_table import dtensor_handler


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_")
def _changed_dims(func: Any, args: Any, kwargs: Any) -> DTensor:
    """The tensor itself, which becomes the view: no element is written.

    Other views show the same memory as before, which their base's anchor stands for.
    """
    tensor: DTensor = args[0]
    operator = getattr(Tensor, canonical_name(func)[0])
    gradients.check_no_leaf(tensor)
    rest = args[1:]

    def change(x: Any) -> Any:
        return operator(x, *rest, **kwargs)

    graded = torch.is_grad_enabled()
    # Whatever mode this is in, the tensor stays what it is in its graph.
    with torch.inference_mode(tensor._local_tensor.is_inference()), torch.enable_grad():
        local_graph.local_of(tensor)  # as it is now, and linked to a user's own Function
        anchor = copied_views.anchor_of(tensor)
        if graded:
            gradients.begin_anew(anchor)
        result: DTensor = change(anchor)
    return gradients.become_view(tensor, anchor, result, change)
