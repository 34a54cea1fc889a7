"""Functions on local tensors that keep a missing gradient None, as torch's operators do.

If no gradient arrives, torch passes zeros to the backward of an ``autograd.Function``. A tensor
that was only redistributed or reduced would then get zeros where a plain tensor gets None. An
optimizer would step, with momentum and weight decay, and ``allow_unused=False`` would not raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: torch's own classmethod, in Python or (from torch 2.14) in C++.
torch_apply: Any = torch.autograd.Function.__dict__["apply"]


class LocalFunction(torch.autograd.Function):
    """A Function whose backward runs only if a gradient arrives, as on all ranks; else None.

    With several results, backward gets None for each result without a gradient.
    """

    # Local tensors need none of what ``local_graph.linking`` does for DTensors.
    apply: Any = torch_apply

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, wrap in (("forward", _forward), ("backward", _backward)):
            if name in vars(cls):
                setattr(cls, name, staticmethod(wrap(getattr(cls, name))))


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        result = original(ctx, *args)
        if args[0].is_inference() and result is not args[0]:
            return as_inference(result)
        return result

    return forward


def as_inference(result: Any) -> Any:
    """The result as an inference tensor.

    torch leaves operators on inference tensors out of the graph, even if the tensor requires a
    gradient. Operators on the result must stay out of the graph as well.
    """
    if not isinstance(result, Tensor) or result.is_inference():
        return result
    with torch.inference_mode():
        return result.clone(memory_format=torch.preserve_format)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None:
                return original(ctx, *grads)
        return (None,) * len(ctx.needs_input_grad)

    return backward
