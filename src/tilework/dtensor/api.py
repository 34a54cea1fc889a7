"""DTensors from plain tensors, and in other layouts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilework.dtensor import gradients
from tilework.dtensor.redistribution import redistribute_local
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, current_mesh


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """The DTensor of which ``local_tensor`` is this rank's part."""
    mesh = device_mesh or current_mesh()
    placements = placements or [Replicate()] * mesh.ndim
    if shape is None:
        sizes = list(local_tensor.shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                sizes[placement.dim] *= mesh.shape[axis]
        shape = sizes
    return wrap(local_tensor, spec_of(mesh, placements, shape, order))


def redistribute(
    tensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    order: Sequence[int] | None = None,
    async_op: bool = False,
) -> DTensor:
    """The same value, laid out otherwise."""
    source = tensor._spec
    target = source.with_placements(placements or source.placements, order)
    local = redistribute_local(gradients.local_of(tensor), source, target, async_op=async_op)
    return wrap(local, target)


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A plain tensor that all ranks have, as a DTensor."""
    mesh = device_mesh or current_mesh()
    placements = placements or [Replicate()] * mesh.ndim
    whole = spec_of(mesh, [Replicate()] * mesh.ndim, tensor.shape)
    target = spec_of(mesh, placements, tensor.shape, order)
    local = redistribute_local(tensor.detach(), whole, target).contiguous()
    return wrap(local.requires_grad_(tensor.requires_grad), target)
