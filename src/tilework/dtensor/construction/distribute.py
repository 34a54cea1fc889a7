"""From plain tensors that a rank has whole to DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.transfer import run_plan
from tilework.comm.world import get_rank
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor, nothing, on_device, wrap
from tilework.layout import Placement, Replicate
from tilework.mesh import DeviceMesh, current_mesh
from tilework.tiled.tensor import TiledTensor
from tilework.tiled.transfer_plans import replicated_tiling, transfer_plan


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A plain tensor's values, distributed over a mesh.

    Collective over the mesh; blocks; each rank gets no more than its part. With
    ``src_data_rank=None`` it is local. What is wrong on one rank raises on all, and nothing has
    moved then. The result shares no memory with ``tensor``; it requires a gradient if ``tensor``
    does, and is a leaf: nothing flows back into ``tensor``. A DTensor that lies so already is
    returned as it is. Of a meta tensor, the parts are meta tensors.

    Args:
        tensor: The whole, a leaf of the graph. Its values count on the source rank; on others it
            must have the same shape, dtype and ``requires_grad``, and may be a meta tensor.
        device_mesh: The mesh; None: the innermost of ``with mesh:``. Ranks outside it get a DTensor
            without elements.
        placements: What each axis does; None: each rank gets it all.
        src_data_rank: The source's place along each axis. None: each rank cuts its own copy, that
            all are the same being the caller's word.
        order: The axes in the order in which they cut; None: from the first to the last.

    Raises:
        ValueError: Placements do not fit, ``tensor`` is a DTensor that lies otherwise, or ranks
            differ.
        RuntimeError: It is no leaf, or no mesh is given or active.
        TypeError: It is no tensor, or none with a dense layout.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return distribute_tensor(torch.arange(3), mesh, [Shard(0)]).to_local().tolist()
        >>> run_ranks(2, program)
        [[0, 1], [2]]
    """
    mesh = device_mesh or current_mesh()
    placements = _or_replicated(placements, mesh)

    def check() -> tuple[DTensorSpec | None, dict[str, Any], bool]:
        _check_whole(tensor, mesh, placements)
        if isinstance(tensor, DTensor):
            _check_lies_so(tensor, mesh, placements, order)
            return None, {"type": "DTensor"}, False
        spec = spec_of(mesh, placements, tensor.shape, order)
        _source(mesh, src_data_rank)
        shared = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
            "layout": str(spec),
            "src_data_rank": src_data_rank,
        }
        return spec, shared, tensor.is_meta

    if src_data_rank is None or mesh.size() == 1 or not mesh.here:
        spec, _, meta = check()
        source = None
    else:
        specs: list[DTensorSpec | None] = []

        def facts() -> dict[str, Any]:
            spec, shared, meta = check()
            specs.append(spec)
            return {**shared, "meta": meta}

        group = mesh.axes_group(range(mesh.ndim))
        by_rank = agree_equal(
            facts, group, "distribute_tensor got different arguments on ranks:", own=("meta",)
        )
        spec, source = specs[0], _source(mesh, src_data_rank)
        meta = bool(by_rank[group.global_ranks.index(source)]["meta"])
    if spec is None:
        assert isinstance(tensor, DTensor)
        return tensor
    if not spec.takes_part:
        return wrap(nothing(tensor), spec)
    local = _part(tensor.detach(), spec, source, meta)
    return wrap(local.requires_grad_(tensor.requires_grad), spec)


def _check_whole(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, got {type(tensor).__name__}")
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor is to distribute leaf tensors, and this one is computed from "
            "others, to which no gradient would flow: use DTensor.from_local, or detach() it"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"only dense tensors can be distributed, got one of {tensor.layout}")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"placements must have the same length as the mesh has axes: {mesh.ndim}, got "
            f"{list(placements)}"
        )
    if isinstance(tensor, TiledTensor) and not isinstance(tensor, DTensor):
        raise TypeError(
            f"a {type(tensor).__name__} is distributed already: use to_dtensor(tensor, mesh)"
        )


def _check_lies_so(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Sequence[int] | None,
) -> None:
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"Cannot distribute a DTensor on {tensor.device_mesh} to a different device mesh, "
            f"{mesh}: make it plain with full_tensor() first"
        )
    if tensor._spec != spec_of(mesh, placements, tensor.shape, order):
        raise ValueError(
            f"Cannot distribute a DTensor with placements {list(tensor.placements)} to a "
            f"different placements {list(placements)}: use redistribute()"
        )


def _source(mesh: DeviceMesh, place: int | None) -> int | None:
    """The global rank at this place along each axis."""
    if place is None:
        return None
    if not 0 <= place < min(mesh.shape):
        raise ValueError(
            f"src_data_rank={place} is to be a place along each axis of a mesh of shape "
            f"{mesh.shape}; None: each rank cuts its own copy"
        )
    return mesh.spec.at((place,) * mesh.ndim)


def _part(whole: Tensor, spec: DTensorSpec, source: int | None, meta: bool) -> Tensor:
    """This rank's part of what the source rank has; of its own, if there is none."""
    if meta:
        return torch.empty(spec.local_shape, dtype=whole.dtype, device="meta")
    dual = spec.dual
    if source is None:
        local = on_device(whole, spec.mesh)[dual.local_box.slices]
        local = local.clone(memory_format=torch.contiguous_format)
    else:
        mesh, rank = spec.mesh, get_rank()
        local = torch.empty(dual.local_shape, dtype=whole.dtype, device=mesh.device_type)
        run_plan(
            transfer_plan(replicated_tiling(spec.shape, (source,)), dual.tiling, rank),
            [on_device(whole, mesh)] if rank == source else [],
            mesh.axes_group(range(mesh.ndim)),
            out=[local],
        )
    return redistribute_local(local, dual, spec)


def _or_replicated(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    return (Replicate(),) * mesh.ndim if placements is None else placements
