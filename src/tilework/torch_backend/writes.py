"""An error that names the collective, where backward needs what the collective overwrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.comm.per_call.internal import call_site


def name_writer(tensor: Tensor, operation: str) -> None:
    """Let backward name ``operation``, if the node that made ``tensor`` needs the old values.

    Operations write to tensors without a word to autograd, except that a write is counted. torch's
    error for the write names the node alone.
    """
    made: Any = tensor.grad_fn
    site = call_site()

    def check(gradients: object) -> None:
        node: Any = torch._C._current_autograd_node()  # held by a hook, it would hold itself
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                _check(node, name, operation, site)

    made.register_prehook(check)


def _check(node: Any, name: str, operation: str, site: str) -> None:
    try:
        getattr(node, name)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            return  # the graph was freed: the node raises
        raise RuntimeError(
            f"{operation} at {site} overwrote the result of {node.name()}, which backward needs: "
            f"let {operation} write to a clone(), or use a functional collective, which autograd "
            f"differentiates"
        ) from error
