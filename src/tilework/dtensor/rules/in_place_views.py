"""Forms in place of operators that only change dims: the tensor itself becomes the view."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilework.dtensor.autograd import gradients
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.tiled.op_names import canonical_name
from tilework.tiled.op_table import dtensor_handler


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_")
def _changed_dims(func: Any, args: Any, kwargs: Any) -> DTensor:
    """The tensor itself, which becomes the view: no element is written."""
    tensor: DTensor = args[0]
    operator = getattr(Tensor, canonical_name(func)[0])

    def redo(x: Any) -> Any:
        return operator(x, *args[1:], **kwargs)

    view = tensor._view_of
    if view is not None:
        copied_views.refresh(tensor)
        before, view.redo, view.write = view.redo, lambda x: redo(before(x)), None
    return gradients.become(tensor, redo(tensor))
