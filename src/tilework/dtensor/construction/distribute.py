"""Full tensors distributed over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal, are_alike, run_plan, single_run
from tilework.comm.per_call.internal import lacks_memory
from tilework.comm.world import get_rank
from tilework.dtensor.propagation.strides import like_strides
from tilework.dtensor.provenance.digests import (
    TensorText,
    agreeing,
    call_counts_of,
    moving,
    stable_digest,
)
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, row_major, spec_of
from tilework.dtensor.tensor import DTensor, empty_local, on_device, wrap
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Placement, Plan, Replicate
from tilework.layout.internal import placements_in, replicated_tiling, transfer_plan, whole_number
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.tiled import TiledTensor


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A plain tensor's values, distributed over a mesh.

    Collective over the mesh; blocks; each rank receives only a shard. With ``src_data_rank=None``
    the call is local. An error on one rank raises on all ranks, before anything moves. The result
    has the strides of a ``clone()`` of the source rank's tensor, and shares no memory with
    ``tensor``. It requires a gradient if ``tensor`` does, and is a leaf: no gradient flows back
    into ``tensor``. A DTensor of this layout is returned as it is. A meta tensor gives meta
    tensors.

    Args:
        tensor: The full tensor, a leaf of the graph. Only the source rank's values count. On other
            ranks the tensor must have the same shape, dtype and ``requires_grad``, and may be a
            meta tensor.
        device_mesh: The mesh; None: the innermost of ``with mesh:``. Ranks outside it get a DTensor
            without elements.
        placements: The placement along each axis; None: replicated.
        src_data_rank: The source's index along each axis. None: each rank cuts a shard from the
            rank's own copy, and nothing checks that all copies are the same.
        order: The axes in the order in which they shard; None: from the first to the last.

    Raises:
        ValueError: Placements do not fit, ``tensor`` is a DTensor of another layout, or ranks
            differ.
        RuntimeError: ``tensor`` is not a leaf, or no mesh is given or active.
        TypeError: ``tensor`` is not a tensor, or not a dense tensor.

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
    mesh = mesh_or_current(device_mesh)
    placements = (Replicate(),) * mesh.ndim if placements is None else placements_in(placements)
    spec: DTensorSpec | None = None

    def checked() -> dict[str, Any]:
        nonlocal spec
        spec, facts = _checked(tensor, mesh, placements, order, src_data_rank)
        return facts

    source, meta, sending = None, False, None
    if src_data_rank is None or mesh.size() == 1 or not mesh.here:
        meta = bool(checked()["meta"])
    else:
        group = mesh.axes_group(range(mesh.ndim))
        sending = _sending(tensor, mesh, placements, order, src_data_rank)
        with agreeing("distribute_tensor"):
            if not are_alike(0 if sending is None else sending.digest, group):
                sending = None
            if sending is None:
                what = "distribute_tensor got different arguments on ranks:"
                facts = agree_equal(checked, group, what, own=_OWN)
                source = _source(mesh, src_data_rank)
                its = facts[group.global_ranks.index(source)]
                meta = bool(its["meta"])
                spec = spec and spec.with_strides(its["strides"])
            else:
                spec = sending.spec
    if spec is None:
        assert isinstance(tensor, DTensor)
        return tensor
    if not spec.takes_part:
        return wrap(empty_local(tensor), spec)
    digest = None
    if src_data_rank is not None:  # otherwise each rank's values decide the digest
        counts = call_counts_of(mesh)
        counts.creations += 1
        digest = hash((spec.digest, counts.creations))
    with torch.no_grad(), moving(digest or 0, "distribute_tensor", TensorText(spec, tensor.dtype)):
        if sending is None:
            local = _local_shard(tensor.detach(), spec, source, meta)
        else:
            sending.call()
            local = redistribute_local(sending.local, spec.dual, spec)
    return wrap(local.requires_grad_(tensor.requires_grad), spec, digest)


class _Sending(NamedTuple):
    """A single collective that distributes a tensor whose facts are the same on all ranks."""

    #: The digest of the facts.
    digest: int
    spec: DTensorSpec
    #: This rank's part, which the call fills.
    local: Tensor
    call: Callable[[], object]


def _sending(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Sequence[int] | None,
    src_data_rank: int,
) -> _Sending | None:
    """The collective; None if one does not suffice, or there is something wrong. Local."""
    try:
        _check_plain(tensor, mesh, placements)
        if isinstance(tensor, DTensor) or lacks_memory(tensor):
            return None
        layout = *placements, None if order is None else tuple(order), src_data_rank
        key = layout, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        known: Any = mesh.specs.get(key)
        if known is None:
            made, facts = _checked(tensor, mesh, placements, order, src_data_rank)
            known = mesh.specs[key] = made, stable_digest(facts) | 1
        spec: DTensorSpec = known[0]
        local = _new_local(tensor, spec.dual, mesh.device_type)
        call = single_run(*_plan(tensor.detach(), spec.dual, local, _source(mesh, src_data_rank)))
    except Exception:  # is raised on all ranks
        return None
    return None if call is None else _Sending(known[1], spec, local, call)


#: Facts that may differ by rank; the facts of the source rank count.
_OWN = ("meta", "strides")


def _checked(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Sequence[int] | None,
    src_data_rank: int | None,
) -> tuple[DTensorSpec | None, dict[str, Any]]:
    """The layout (None: the DTensor has it), and the facts that ranks compare."""
    _check_plain(tensor, mesh, placements)
    if isinstance(tensor, DTensor):
        _check_layout(tensor, mesh, placements, order)
        return None, {"type": "DTensor", "meta": False, "strides": ()}
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not tensor.is_contiguous():
        strides = like_strides(shape, strides)
    spec = spec_of(mesh, placements, shape, order, strides)
    if src_data_rank is not None:
        _source(mesh, src_data_rank)
    in_order = "" if spec.order is None else f" in the order {spec.order}"
    return spec, {
        "type": "a plain tensor",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "layout": f"{list(spec.placements)}{in_order} on {mesh}",
        "src_data_rank": src_data_rank,
        "meta": lacks_memory(tensor),
        "strides": strides,
    }


def _check_plain(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    refuse_torch_dtensor(tensor, "distribute_tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, got {type(tensor).__name__}")
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor can only distribute leaf tensors. This tensor was computed from "
            "others, to which no gradient would flow: use DTensor.from_local, or detach() it"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "that is nested" if tensor.is_nested else f"of {tensor.layout}"
        raise TypeError(f"only dense tensors can be distributed, got one {kind}")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"placements must have the same length as the mesh has axes: {mesh.ndim}, got "
            f"{list(placements)}"
        )
    if isinstance(tensor, TiledTensor) and not isinstance(tensor, DTensor):
        raise TypeError(
            f"distribute_tensor takes a plain tensor or a DTensor, got a {type(tensor).__name__}, "
            f"which is sharded already: convert it with tilework.dtensor.to_dtensor(tensor, mesh)"
        )


def _check_layout(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], order: Sequence[int] | None
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


def _source(mesh: DeviceMesh, index: int) -> int:
    """The global rank at this index along each axis."""
    index = whole_number(index, "src_data_rank is a place along each axis, a whole number, or None")
    if not 0 <= index < min(mesh.shape):
        raise ValueError(
            f"src_data_rank={index} must be an index along each axis of the mesh, whose shape is "
            f"{mesh.shape}, or None, with which each rank cuts a shard from a copy of its own"
        )
    return mesh.spec.at((index,) * mesh.ndim)


def _local_shard(full: Tensor, spec: DTensorSpec, source: int | None, meta: bool) -> Tensor:
    """This rank's shard of ``full`` on rank ``source`` (None: on each); ``meta``: no values."""
    if meta:
        return _new_local(full, spec, "meta")
    dual = spec.dual
    local = _new_local(full, dual, spec.mesh.device_type)
    if source is None:
        local.copy_(dual.local_part(full))
    else:
        plan, tiles, out, group = _plan(full, dual, local, source)
        run_plan(plan, tiles, group, out=out)
    return redistribute_local(local, dual, spec)


def _new_local(full: Tensor, spec: DTensorSpec, where: str) -> Tensor:
    """Memory for this rank's part, in the order of the global strides."""
    shape = tuple(spec.local_shape)
    strides = row_major(shape)
    if spec.strides != row_major(spec.shape):
        strides = like_strides(shape, spec.strides)
    return torch.empty_strided(shape, strides, dtype=full.dtype, device=where)


def _plan(
    full: Tensor, dual: DTensorSpec, local: Tensor, source: int
) -> tuple[Plan, list[Tensor], list[Tensor], ProcessGroup]:
    """The plan that fills ``local`` from rank ``source``; the tensors, and the group."""
    rank, mesh = get_rank(), dual.mesh
    plan = transfer_plan(replicated_tiling(dual.shape, (source,)), dual.tiling, rank)
    tiles = [on_device(full, mesh)] if rank == source else []
    return plan, tiles, dual.tiles_of(local), mesh.axes_group(range(mesh.ndim))
