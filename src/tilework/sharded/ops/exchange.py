"""Exchanges between ranks inside an operator, and of gradients in its backward.

Here each rank has separate values and a separate loss: gradients are those of the sum of all ranks'
losses, and every rank must run backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal, all_to_all_single, run_plan
from tilework.comm.world import get_process_group_ranks
from tilework.layout import Box, Tile, Tiling, plan
from tilework.layout.internal import replicated_tiling, whole_box
from tilework.sharded.moves import move_tiles
from tilework.sharded.ops.tiles import graph_tiles, no_elements
from tilework.sharded.tensor import ShardedTensor


def agree_on_gradients(
    count: Callable[[], list[int]], inputs: Sequence[Tensor], group: ProcessGroup
) -> list[list[int]]:
    """The numbers of each rank, after all agreed on which inputs need a gradient. Collective.

    ``count`` checks this rank's arguments, and returns numbers that the others need; it may raise.
    """
    enabled = torch.is_grad_enabled()
    needs = [enabled and tensor.requires_grad for tensor in inputs]
    by_rank = agree_equal(
        lambda: {"requires_grad": needs, "numbers": count()},
        group,
        "the inputs must need gradients on all ranks or on none, since backward communicates:",
        own=("numbers",),
    )
    return [facts["numbers"] for facts in by_rank]


def exchange(parts: Sequence[Tensor], received: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """The flat tensors from each rank, after sending a part to each. Collective, also backward."""
    sent = [part.numel() for part in parts]
    flat: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        torch.cat(list(parts)), sent, list(received), group
    )
    return list(flat.split_with_sizes(list(received)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.back = received, sent, group
        out = flat.new_empty(sum(received))
        all_to_all_single(out, flat, received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back: Tensor = _Exchange.apply(gradient.contiguous(), *ctx.back)  # type: ignore[no-untyped-call]
        return back, None, None, None


def spread(tensor: ShardedTensor) -> Tensor:
    """The full tensor on each rank, as a separate value. Collective, also backward."""
    full: Tensor = _Spread.apply(  # type: ignore[no-untyped-call]
        tensor.detach(), *graph_tiles(tensor)
    )
    return full


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, *tiles: Tensor) -> Tensor:
        ctx.tensor, ctx.stand_in = tensor, None if tensor.local_tiles() else tiles[0]
        ranks = tuple(get_process_group_ranks(tensor.process_group))
        return move_tiles(tensor, replicated_tiling(tuple(tensor.shape), ranks))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor: ShardedTensor = ctx.tensor
        group, shape = tensor.process_group, tuple(tensor.shape)
        # The gradient is partial: each rank has another addend.
        ranks = get_process_group_ranks(group)
        partial = tuple((Tile(whole_box(shape), (rank,)),) for rank in ranks)
        source = Tiling(shape, partial, "sum" if len(partial) > 1 else None)
        steps = plan(source, tensor.tiling, _global_rank(tensor))
        tiles = run_plan(steps, [gradient.contiguous()], group, dtype=gradient.dtype)
        return None, *(tiles if ctx.stand_in is None else [torch.zeros_like(ctx.stand_in)])


def _global_rank(tensor: ShardedTensor) -> int:
    group: Any = tensor.process_group
    rank: int = group.global_ranks[group.rank()]
    return rank


def assemble(shape: Sequence[int], boxes: Sequence[Box], parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose boxes these parts fill; each part gets a slice of the gradient."""
    full: Tensor = _Assemble.apply(tuple(shape), boxes, *parts)  # type: ignore[no-untyped-call]
    return full


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], boxes: Sequence[Box], *parts: Tensor) -> Tensor:
        ctx.boxes = boxes
        full = parts[0].new_empty(shape)
        for box, part in zip(boxes, parts, strict=True):
            full[box.slices] = part
        return full

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient[box.slices] for box in ctx.boxes)


def working_tiles(weight: ShardedTensor) -> list[tuple[Box, Tensor]]:
    """This rank's tiles that have elements, with their boxes; an empty tile if there are none."""
    boxes = weight.tiling.boxes_of(_global_rank(weight))
    tiles = [(b, t) for b, t in zip(boxes, weight.local_tiles(), strict=True) if not b.empty]
    zeros = (0,) * weight.dim()
    return tiles or [(Box(zeros, zeros), no_elements(weight, weight.dim()))]


def tiles_by_rank(weight: ShardedTensor, group: ProcessGroup) -> list[list[Box]]:
    """The boxes with elements of each rank of the group, in the group's order."""
    of_rank = [weight.tiling.boxes_of(rank) for rank in group.global_ranks]
    return [[box for box in boxes if not box.empty] for boxes in of_rank]
