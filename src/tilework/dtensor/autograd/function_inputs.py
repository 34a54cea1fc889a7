"""Links from the results of a user's own autograd.Function to the graph of local tensors.

torch calls ``Function.apply`` without ``__torch_function__``: the Function enters the graph of the
wrappers. If a second Function and an operator take the result, the second Function would join the
graph of the wrappers, and the operator that of local tensors. The first Function's backward would
run twice, and tensors that the second saved would leave the graph. Results are therefore linked as
soon as ``apply`` returns: every Function takes leaves of the wrappers' graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.checkpoint

from tilework.dtensor.autograd.local_graph import (
    as_leaf,
    link_results,
    local_of,
    mirror_requires_grad,
)
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.views.places import note_taken

#: In torch's error for a Function that writes to a leaf in place.
_LEAF_WRITTEN = "a leaf Variable that requires grad has been used in an in-place operation"


def linking(original: Any) -> Any:
    """A replacement of ``torch.autograd.Function.apply`` that links DTensors among the results."""

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple([_as_leaf(arg) for arg in args])
        kwargs = {name: _as_leaf(arg) for name, arg in kwargs.items()}
        try:
            results = original(cls, *args, **kwargs)
        except RuntimeError as error:
            if _LEAF_WRITTEN not in str(error) or not any(map(_is_computed, args)):
                raise
            raise RuntimeError(
                f"{cls.__name__} calls mark_dirty() on a DTensor that was computed by operators. "
                f"torch takes that DTensor for a leaf, and refuses the write: return a new tensor "
                f"instead, or apply {cls.__name__} to to_local()"
            ) from error
        link_results(results if results.__class__ is tuple else (results,))
        return results

    return classmethod(apply)


def _is_computed(arg: Any) -> bool:
    return isinstance(arg, DTensorBase) and not arg.is_leaf


def _as_leaf(arg: Any) -> Any:
    if isinstance(arg, DTensorBase):
        if arg._viewed is not None:  # what it shows may have entered the graph since
            local_of(arg)
            mirror_requires_grad(arg)
        note_taken(arg)
    is_result = isinstance(arg, DTensorBase) and arg._made_without_grad
    return as_leaf(arg) if is_result else arg


_function: Any = torch.autograd.Function
_function.apply = linking(_function.apply.__func__)


def noting_saved(original: Any) -> Any:
    """A replacement of a checkpoint's ``save_inputs`` that notes which DTensors C++ saves.

    torch compares the versions of saved tensors later: writes to them must be counted.
    """

    @functools.wraps(original)
    def save_inputs(frame: Any, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, DTensorBase):
                note_taken(arg)
        return original(frame, *args)

    return save_inputs


# Torch before 2.13 saves them by a Function, which the above takes in.
_frame: Any = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
if hasattr(_frame, "save_inputs"):
    _frame.save_inputs = noting_saved(_frame.save_inputs)
