"""Layouts and DTensors in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilework.comm.per_call.internal import has_memory
from tilework.dtensor.base import DTensorBase, is_stale
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Partial, Shard

_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype in few letters, such as ``bf16``."""
    name = str(dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    return _SHORT[kind] + name[len(kind) :] if kind in _SHORT and kind != name else name


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A shape and dtype, like ``f32[3, 4]``."""
    return f"{dtype_text(dtype)}[{', '.join(map(str, shape))}]"


def layout_text(spec: DTensorSpec, dtype: torch.dtype) -> str:
    """A layout, like ``f32[1024@dp, 4096] partial(sum)@tp``: each dim, then the axes, in order."""
    names = spec.mesh.mesh_dim_names or tuple(map(str, range(spec.mesh.ndim)))

    def axis_text(axis: int) -> str:
        placement = spec.placements[axis]
        assert isinstance(placement, Shard)
        if placement.turns > 1:
            return f"@{names[axis]}({placement.turns} turns)"
        sizes = "" if placement.sizes is None else f"({'+'.join(map(str, placement.sizes))})"
        return f"@{names[axis]}{sizes}"

    dims = [
        f"{size}{''.join(map(axis_text, spec.axes_of(dim)))}" for dim, size in enumerate(spec.shape)
    ]
    partial = [
        f" partial({placement.reduce_op})@{name}"
        for name, placement in zip(names, spec.placements, strict=True)
        if isinstance(placement, Partial)
    ]
    return f"{dtype_text(dtype)}[{', '.join(dims)}]{''.join(partial)}"


def headline(tensor: DTensorBase) -> str:
    """The repr() of a tensor. Local: shows no elements, as other ranks may hold them.

    The exception is a 0-d tensor, whose value is shown unless it is partial.
    """
    spec = tensor._spec
    local = tensor._local_tensor
    gradient = ", requires_grad" if local.requires_grad else ""
    where = "meta" if local.is_meta else spec.mesh.device_type
    is_known = _has_value(spec, local) and not is_stale(tensor)
    value = f" = {local.item():.6g}" if is_known else ""
    layout = layout_text(spec, local.dtype)
    return f"DTensor {layout}{value} on {where} mesh {spec.mesh.spec}{gradient}"


def _has_value(spec: DTensorSpec, local: torch.Tensor) -> bool:
    """True for a single number that is not partial, in memory that can be read now."""
    replicated = all(placement.is_replicate() for placement in spec.placements)
    return not spec.shape and replicated and spec.takes_part and has_memory(local)
