"""The values of a tensor in another layout; through autograd, where one asks for that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.agreement import agree
from tilework.comm.contract import ProcessGroup
from tilework.comm.transfer import run_plan
from tilework.comm.world import NonMember, get_process_group_ranks, get_rank
from tilework.layout import Tiling, plan
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


def check_alike(layouts: Callable[[], Mapping[str, str]], group: ProcessGroup) -> None:
    """Whether all ranks are about to load the same things. Collective; blocks.

    Args:
        layouts: For each name what comes there. May raise what is wrong on this rank.

    Raises:
        ValueError: They are not; raised on all ranks.
        Exception: ``layouts`` raised, here or on another rank.
    """
    said = agree(lambda: dict(layouts()), group)
    ranks = get_process_group_ranks(group)
    for rank, others in zip(ranks, said, strict=True):
        for name in [*said[0], *others]:
            if said[0].get(name) != others.get(name):
                raise ValueError(
                    f"ranks load different things into {name!r}: {said[0].get(name)} on rank "
                    f"{ranks[0]}, {others.get(name)} on rank {rank}"
                )


def resharded(tensor: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    """``tensor`` cut anew, as another tensor; gradients flow back to its shards.

    Collective over its group, and so is backward through the result.

    Raises:
        ValueError: The spec does not fit the tensor or the group.
        RuntimeError: A gradient is needed, and a rank of the group would have no shard by which
            it could take part in backward.
    """
    made = copy.copy(tensor)
    group = tensor.process_group
    if not (torch.is_grad_enabled() and tensor.requires_grad) or isinstance(group, NonMember):
        return made.reshard(spec)
    target = ShardedTensor(
        spec, tensor.shape, dtype=tensor.dtype, requires_grad=True, process_group=group
    )
    idle = [rank for rank in get_process_group_ranks(group) if rank not in target.tiling.ranks]
    if idle:
        raise RuntimeError(
            f"ranks {idle} would have no shard, and so no part in backward, which needs all: give "
            f"each a shard (an empty one will do), or detach() the tensor first"
        )
    # Even a rank that had no shard takes part in backward: the anchor needs a gradient.
    anchor = torch.empty(0, requires_grad=True)
    moved = _Move.apply(  # type: ignore[no-untyped-call]
        anchor, tensor.tiling, target.tiling, group, tensor.dtype, *tensor.local_tiles()
    )
    placed = zip(moved, target.local_tiles(), strict=True)
    return target.like([tile.to(own.device) for tile, own in placed])


class _Move(torch.autograd.Function):
    """Tiles from one tiling to another; their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        source: Tiling,
        target: Tiling,
        group: ProcessGroup,
        dtype: torch.dtype,
        *tiles: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.moved = source, target, group, dtype
        return tuple(run_plan(plan(source, target, get_rank()), tiles, group, dtype=dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, target, group, dtype = ctx.moved
        steps = plan(target, source, get_rank())
        return None, None, None, None, None, *run_plan(steps, gradients, group, dtype=dtype)
