"""DTensors in files: each rank saves a local tensor, and loads it again.

The file has plain data and a plain tensor, so that ``torch.load`` takes it with
``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilework.comm.world import get_world_size
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.propagation.strides import is_dense, like_strides
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import find_or_make

#: Device type, shape, ranks and names of a mesh.
Mesh = tuple[str, Ints, Ints, tuple[str, ...] | None]
#: A kind of placement, and the arguments that make it.
_Placement = tuple[str, tuple[Any, ...]]
#: Placements, shape and order; then the global strides, which older files do not have.
Layout = (
    tuple[list[_Placement], Ints, Ints | None] | tuple[list[_Placement], Ints, Ints | None, Ints]
)

_KINDS: dict[str, Any] = {"shard": Shard, "replicate": Replicate, "partial": Partial}


def layout_to_save(tensor: DTensorBase) -> tuple[Mesh, Layout, Ints | None]:
    """A tensor's mesh and layout and this rank's coordinate, as plain data."""
    spec = tensor._spec
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    placements = [_placement(placement) for placement in spec.placements]
    strides = like_strides(spec.shape, spec.strides)  # as loaded: dense, in memory of its own
    return (
        (mesh.device_type, mesh.shape, mesh.spec.ranks, mesh.mesh_dim_names),
        (placements, spec.shape, spec.order, tuple(map(int, strides))),
        None if coordinate is None else tuple(coordinate),
    )


def _placement(placement: Placement) -> _Placement:
    if isinstance(placement, Shard):
        turns = () if placement.turns == 1 else (placement.turns,)
        return "shard", (placement.dim, placement.sizes, *turns)
    return (
        ("partial", (placement.reduce_op,)) if isinstance(placement, Partial) else ("replicate", ())
    )


def compact(local: Tensor) -> Tensor:
    """The local tensor, detached, in a storage of exactly that size, as pickle writes all."""
    local = local.detach()
    fills = local.untyped_storage().nbytes() == local.nbytes
    fills = fills and is_dense(tuple(local.shape), local.stride())
    return local if fills else local.clone()


def spec_of_saved(
    local: Tensor, mesh: Mesh, layout: Layout, coordinate: Sequence[int] | None
) -> DTensorSpec:
    """The saved layout, on this rank's mesh. Collective over all ranks if the mesh is not there
    yet.

    Raises:
        RuntimeError: The world has fewer ranks than the mesh needs.
        ValueError: The local tensor was saved at another coordinate of the mesh.
    """
    placements = [_KINDS[kind](*arguments) for kind, arguments in layout[0]]
    ranks = mesh[2]
    if max(ranks) >= get_world_size():
        raise RuntimeError(
            f"this is part of a tensor of shape {list(layout[1])} that was saved on a mesh of "
            f"ranks {list(ranks)}, and the mesh should not be bigger than this job's world of "
            f"{get_world_size()}: load it in a job of {max(ranks) + 1} ranks, or save with "
            f"tilework.checkpoint, which loads into any world, or save full_tensor()"
        )
    device_mesh: DeviceMesh = find_or_make(*mesh)
    strides = layout[3] if len(layout) > 3 else None
    spec = spec_of(device_mesh, placements, layout[1], layout[2], strides)
    here = device_mesh.get_coordinate()
    if _shard_index(here, spec) != _shard_index(coordinate, spec):
        raise ValueError(
            f"this is the part that the rank at {_at(coordinate)} of {device_mesh} saved, of a "
            f"tensor of shape {list(spec.shape)} with placements {placements}; this rank is at "
            f"{_at(here)}: load what this rank saved, or save full_tensor()"
        )
    if spec.takes_part and local.shape != spec.local_shape:
        raise ValueError(
            f"the saved part has shape {list(local.shape)}, but a part of {spec} has shape "
            f"{list(spec.local_shape)} on this rank: the saved data do not fit their layout; save "
            f"the tensor again"
        )
    return spec


def _shard_index(coordinate: Sequence[int] | None, spec: DTensorSpec) -> list[int] | None:
    """The coordinate with 0 along replicated axes: the same for the same local tensor."""
    if coordinate is None:
        return None
    return [
        0 if placement.is_replicate() else index
        for index, placement in zip(coordinate, spec.placements, strict=True)
    ]


def _at(coordinate: Sequence[int] | None) -> str:
    return "no place" if coordinate is None else str(list(coordinate))
