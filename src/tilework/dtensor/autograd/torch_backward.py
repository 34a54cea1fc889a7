"""``torch.autograd.backward`` on DTensors with torch before 2.9, which asks no class about it.

That function would silently end at a DTensor, and no parameter would get a gradient. With those
versions of torch it is replaced by a function that asks ``__torch_function__`` of arguments, as
newer versions do, and calls the original if there is none. Reentrant checkpoints call it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function, is_tensor_like

_is_tensor: Any = is_tensor_like


class _Asked:
    """An object whose class defines ``__torch_function__``, to try out who asks for that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        return None


def asks_classes() -> bool:
    """True if ``torch.autograd.backward`` asks ``__torch_function__`` of the arguments' classes."""
    backward: Any = torch.autograd.backward
    try:
        backward(_Asked())
    except TypeError:  # torch reads it as a sequence of tensors
        return False
    return True


def asking(original: Any) -> Any:
    """A replacement of ``torch.autograd.backward`` that first asks ``__torch_function__``."""

    def tuple_of(given: Any) -> tuple[Any, ...]:
        alone = _is_tensor(given) or not isinstance(given, Iterable)
        return (given,) if alone else tuple(given)

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> Any:
        tensors = tuple_of(tensors)
        inputs = None if inputs is None else tuple_of(inputs)
        asked = tuple(each for each in (*tensors, *(inputs or ())) if _is_tensor(each))
        if has_torch_function(asked):
            return handle_torch_function(backward, asked, tensors, *args, inputs=inputs, **kwargs)
        return original(tensors, *args, inputs=inputs, **kwargs)

    return backward


if not asks_classes():
    torch.autograd.backward = asking(torch.autograd.backward)
