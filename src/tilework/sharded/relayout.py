"""The values of a tensor in another layout; through autograd, where one asks for that."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.contract import ProcessGroup
from tilework.comm.transfer import run_plan
from tilework.comm.world import NonMember, get_process_group_ranks, get_rank
from tilework.layout import Tiling, plan
from tilework.sharded.alike import check_alike
from tilework.sharded.checks import check_spec
from tilework.sharded.ops.tiles import graph_tiles, keep_stand_in
from tilework.sharded.specs import ShardingSpec
from tilework.sharded.tensor import ShardedTensor


def laid_out_as(source: Tensor, like: ShardedTensor) -> ShardedTensor:
    """The values of ``source``, cut and placed as ``like``, without gradients.

    A plain ``source`` is one that every rank has whole: each takes its part, and nothing is
    communicated. A sharded one is moved over the group of ``like``: collective over it. What need
    not move is not copied.

    Raises:
        ValueError: The sizes differ, or a rank outside the group of ``like`` holds a shard.
    """
    if source.shape != like.shape:
        raise ValueError(
            f"a tensor of size {tuple(source.shape)} has no values for one of size "
            f"{tuple(like.shape)}"
        )
    tiles = [tile.detach() for tile in _tiles(source, like)]
    placed = zip(tiles, like.local_tiles(), strict=True)
    return like.like(
        [tile.to(own.device) for tile, own in placed], dtype=source.dtype, requires_grad=False
    )


def _tiles(source: Tensor, like: ShardedTensor) -> list[Tensor]:
    if not isinstance(source, ShardedTensor):
        return [source[shard.metadata.box.slices] for shard in like.local_shards()]
    if source.tiling == like.tiling:
        return source.local_tiles()
    group = like.process_group
    if isinstance(group, NonMember):
        return []
    members = get_process_group_ranks(group)
    outside = [rank for rank in source.tiling.ranks if rank not in members]
    if outside:
        raise ValueError(
            f"ranks {outside} hold shards of the tensor, but are not in the group of ranks "
            f"{members} that is to get it: reshard it onto those first"
        )
    steps = plan(source.tiling, like.tiling, get_rank())
    return run_plan(steps, source.local_tiles(), group, dtype=source.dtype)


def layout_of(value: object) -> str:
    """What ranks must agree on before they move a value."""
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = f"{value.dtype} of size {list(value.shape)}"
    if not isinstance(value, ShardedTensor):
        return f"a plain tensor, {kind}"
    return f"a sharded tensor, {kind} by {value.sharding_spec()}"


def resharded(tensor: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    """``tensor`` cut anew, as another tensor; gradients flow back to its shards.

    Collective over its group, and so is backward through the result.

    Raises:
        ValueError: The spec does not fit the tensor or the group.
    """
    made, group = copy.copy(tensor), tensor.process_group
    if not (torch.is_grad_enabled() and tensor.requires_grad) or isinstance(group, NonMember):
        return made.reshard(spec)
    check_alike(lambda: {"resharding_spec": repr(check_spec(spec))}, group)
    target = ShardedTensor(spec, tensor.shape, dtype=tensor.dtype, process_group=group)
    # A rank without tiles has a stand-in, before and after, and so a part in backward.
    moved = _Move.apply(  # type: ignore[no-untyped-call]
        tensor.tiling, target.tiling, group, *graph_tiles(tensor)
    )
    own = target.local_tiles()
    if not own:
        result = target.like([], requires_grad=True)
        keep_stand_in(result, moved[0])
        return result
    tiles = [tile.to(place.device) for tile, place in zip(moved, own, strict=True)]
    return target.like(tiles, requires_grad=True)


class _Move(torch.autograd.Function):
    """Tiles from one tiling to another; their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, source: Tiling, target: Tiling, group: ProcessGroup, *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.moved = source, target, group
        return _moved(source, target, group, tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, target, group = ctx.moved
        return None, None, None, *_moved(target, source, group, gradients)


def _moved(
    source: Tiling, target: Tiling, group: ProcessGroup, tiles: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """This rank's tiles of ``target``; a stand-in for none, here as in ``tiles``."""
    rank, like = get_rank(), tiles[0]
    held = tiles if source.of(rank) else ()
    moved = run_plan(plan(source, target, rank), held, group, dtype=like.dtype, device=like.device)
    return tuple(moved) or (like.new_zeros((0,) * len(target.shape)),)
