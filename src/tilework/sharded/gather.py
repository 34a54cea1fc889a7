"""A sharded tensor's values on one rank, or on all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.operations.internal import agree, agree_equal, run_plan
from tilework.comm.world import NonMember, get_group_rank, get_process_group_ranks, get_rank
from tilework.layout.internal import replicated_tiling, transfer_plan
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.graph import graph_tiles
from tilework.sharded.reshard import has_values, move_tiles
from tilework.tiled import TiledTensor


def gather(
    tensor: ShardedTensorBase,
    dst: int,
    out: Tensor | None,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> None:
    """See :meth:`ShardedTensor.gather`."""
    group = tensor._process_group
    if isinstance(group, NonMember):
        return
    if enforce_dtype:  # known only on dst
        dtypes = agree(lambda: getattr(_checked_out(tensor, dst, out), "dtype", None), group)
        members = get_process_group_ranks(group)
        dtype = dtypes[get_group_rank(group, dst)] if dst in members else None
    # The wrapper's attributes are intercepted, which takes longer.
    properties = tensor.metadata().tensor_properties
    sent = dtype or properties.dtype
    tiles, into, real = list[Tensor](), list[Tensor](), True

    def facts() -> dict[str, Any]:
        # Memory is allocated here, so that all ranks raise if it fails.
        nonlocal real
        target, real = _checked_out(tensor, dst, out), has_values(tensor)
        if real:
            tiles.extend(tile.detach().to(sent) for tile in tensor.local_tiles())
        if real and target is not None:
            into.append(_receive_buffer(target, sent, tensor.device))
        return {"dst": dst, "enforce_dtype": bool(enforce_dtype), "dtype": str(dtype)}

    agree_equal(facts, group)
    if not real:
        return
    target = replicated_tiling(tuple(tensor.metadata().size), (dst,))
    plan = transfer_plan(tensor.tiling, target, get_rank())
    run_plan(plan, tiles, group, out=into or None, dtype=sent)
    if out is not None and out.data_ptr() != into[0].data_ptr():
        with torch.no_grad():
            out.copy_(into[0])


def _receive_buffer(out: Tensor, sent: torch.dtype, device: torch.device) -> Tensor:
    """``out`` itself, if it has the dtype ``sent`` and type of ``device``; else a new buffer."""
    if (out.dtype, out.device.type) == (sent, device.type):
        return out.detach()
    return torch.empty(out.shape, dtype=sent, device=device)


def _checked_out(tensor: ShardedTensorBase, dst: int, out: Tensor | None) -> Tensor | None:
    ranks, rank = get_process_group_ranks(tensor._process_group), get_rank()
    if dst not in ranks:
        raise ValueError(f"dst={dst!r} is not part of the tensor's group of ranks {ranks}")
    if rank != dst:
        if out is not None:
            raise ValueError(
                f"Argument `out` must NOT be specified on non-destination ranks: this is rank "
                f"{rank}, dst is {dst}"
            )
        return None
    if out is None:
        raise ValueError(
            f"Argument `out` must be specified on destination rank {dst}: a tensor of size "
            f"{tuple(tensor.shape)}"
        )
    if not isinstance(out, Tensor) or isinstance(out, TiledTensor):
        raise TypeError(f"Argument `out` must be a plain tensor, got {type(out).__name__}")
    if out.shape != tensor.metadata().size:
        raise ValueError(
            f"Argument `out` has size {tuple(out.shape)}, but should be {tuple(tensor.shape)}"
        )
    if out.is_meta and has_values(tensor):
        raise ValueError("Argument `out` is on the meta device, where nothing can be written")
    return out


def full_tensor(tensor: ShardedTensorBase) -> Tensor:
    """See :meth:`ShardedTensor.full_tensor`."""
    group = tensor._process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"full_tensor: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    if not has_values(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    full: Tensor = _GatherTiles.apply(tensor, *graph_tiles(tensor))  # type: ignore[no-untyped-call]
    return full


class _GatherTiles(torch.autograd.Function):
    """Forward makes the full tensor of all tiles, on every rank of the group.

    Backward gives each tile a slice of the full gradient, which is the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensorBase, *tiles: Tensor) -> Tensor:
        ranks = tuple(get_process_group_ranks(tensor._process_group))
        ctx.boxes = tensor.tiling.boxes_of(get_rank())
        ctx.stand_in = None if ctx.boxes else tiles[0].detach()
        return move_tiles(tensor, replicated_tiling(tuple(tensor.shape), ranks))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.stand_in is not None:
            return None, torch.zeros_like(ctx.stand_in)
        return None, *(gradient[box.slices].clone() for box in ctx.boxes)
