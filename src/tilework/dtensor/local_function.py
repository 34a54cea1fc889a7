"""Functions on local tensors, for which no gradient at all is none, as it is for torch's operators.

torch gives the backward of an ``autograd.Function`` zeros where no gradient came. A tensor that was
only redistributed, or reduced, would have a gradient of zeros where a plain one has None: an
optimizer would step, with momentum and weight decay, and ``allow_unused=False`` would not raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LocalFunction(torch.autograd.Function):
    """A Function whose backward is called only if a gradient came; else it gives none.

    The ranks agree on that, for they have one graph. Of several results, those without a gradient
    have None. Of an inference tensor the result is one, too.
    """

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
    """An inference tensor of what was moved of one: torch records operators on none but such in
    no graph, even if one requires a gradient, as what was given such data.
    """
    if not isinstance(result, Tensor) or result.is_inference():
        return result
    with torch.inference_mode():
        return result.clone(memory_format=torch.preserve_format)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return original(ctx, *grads)

    return backward
