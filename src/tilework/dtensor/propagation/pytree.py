"""Tensors in the arguments and results of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Replicate
from tilework.mesh import DeviceMesh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def whole_spec(tensor: Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """The layout of a plain tensor that every rank has."""
    return spec_of(mesh, (Replicate(),) * mesh.ndim, tuple(tensor.shape))


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor as a DTensor, replicated."""
    return wrap(tensor, whole_spec(tensor, mesh))


def replaced_one(value: Any, parts: Any) -> Any:
    """The same argument with tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(parts)
    kind = value.__class__
    if kind is list or kind is tuple:
        return kind([replaced_one(one, parts) for one in value])
    if kind is dict:
        return {name: replaced_one(one, parts) for name, one in value.items()}
    return value


def replaced(values: Sequence[Any], parts: Any) -> list[Any]:
    """The same arguments with tensors replaced, in order."""
    return [replaced_one(value, parts) for value in values]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in tensors_in(one)]
    return []


def rebuilt(value: Any, parts: Any) -> Any:
    """A result with its tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(parts)
    if isinstance(value, list):
        return [rebuilt(one, parts) for one in value]
    if isinstance(value, tuple):
        made = [rebuilt(one, parts) for one in value]
        if type(value) is tuple:
            return tuple(made)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def wrapped(result: Any, outputs: list[DTensorSpec] | None, mesh: DeviceMesh) -> Any:
    """A local result as DTensors."""
    found = tensors_in(result)
    if not found:
        return result
    if outputs is None:
        outputs = [whole_spec(one, mesh) for one in found]
    if not torch.is_grad_enabled():  # torch's views still say that they require a gradient
        found = [one.detach() if one.requires_grad else one for one in found]
    return rebuilt(
        result,
        iter([
            wrap(one, spec) if one.layout is torch.strided else one
            for one, spec in zip(found, outputs, strict=True)
        ]),
    )  # fmt: skip
