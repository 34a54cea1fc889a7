"""Refusals of calls, on all ranks alike: kernels look at little where there are no elements.

A rank whose part of a tensor is empty would accept ``float32 @ float64``, and wait later for the
ranks that raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.spec import DTensorSpec, Ints

#: Most operators take them, if there is but one tensor.
_FLOATS = (torch.float32, torch.float64)
#: Full tensors of more elements are not made to try an operator.
_MOST_TRIED = 1 << 16


def refused(call: Any, specs: Sequence[DTensorSpec], runs_on_locals: bool) -> Exception | None:
    """The error of the ranks that have elements, if some have none; None if there is none. Local.

    Args:
        call: A call.
        specs: The layouts of its tensors, as it needs them.
        runs_on_locals: True if its function runs on local tensors, with its other arguments.
    """
    dtypes = [tensor.dtype for tensor in call.tensors]
    if all(0 in spec.shape for spec in specs):  # a rank without a batch would look at no other dim
        return _refusal(call, [spec.shape for spec in specs], dtypes)
    if not any(spec.has_empty_parts for spec in specs):
        return None
    if len(dtypes) == 1 and dtypes[0] in _FLOATS:
        return None
    shapes = _shapes_with_elements(specs) if runs_on_locals else _small_shapes(specs)
    if shapes is None:
        return None
    refusal = _refusal(call, shapes, dtypes)
    if refusal is None:
        return None
    # What is refused whatever the dtypes are is so for the elements that it was tried with.
    rest = len(dtypes) - 1
    for others in (torch.float64, torch.int64):
        if _refusal(call, shapes, [torch.float64, *[others] * rest]) is None:
            return refusal
    return None


def _shapes_with_elements(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The local shapes on the first rank where no tensor is empty; None if there is none."""
    if any(0 in spec.shape for spec in specs):
        return None
    for coordinate in product(*map(range, specs[0].mesh.spec.shape)):
        shapes = [spec.box_at(coordinate).sizes for spec in specs]
        if all(0 not in shape for shape in shapes):
            return shapes
    return None


def _small_shapes(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The shapes of the full tensors; None if one of them is large."""
    shapes = [spec.shape for spec in specs]
    return None if any(prod(shape) > _MOST_TRIED for shape in shapes) else shapes


def _refusal(call: Any, shapes: Sequence[Ints], dtypes: Sequence[torch.dtype]) -> Exception | None:
    """The error for tensors of these shapes and dtypes, whatever they hold; None if there is none.

    Indices have to be in range, and divisors not 0.
    """
    refusal: Exception | None = None
    for number in (0, 1):
        try:
            call.on_tensors(
                [
                    _full(tensor, shape, number, dtype)
                    for tensor, shape, dtype in zip(call.tensors, shapes, dtypes, strict=True)
                ]
            )
        except Exception as error:
            refusal = error
        else:
            return None
    return refusal


def _full(tensor: Tensor, shape: Ints, number: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, number, dtype=dtype, device=tensor.device)
