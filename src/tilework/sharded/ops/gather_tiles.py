"""Values that all ranks hold: what each tile gives, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.collectives import all_gather_into_tensor
from tilework.comm.contract import ProcessGroup
from tilework.sharded.ops.tiles import member_of, zeros_after
from tilework.sharded.tensor import ShardedTensor


def of_each_tile(tensor: ShardedTensor, give: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``give`` makes of each tile that has elements, stacked, on every rank.

    Collective: one all_gather of what the rank with most tiles gives. The gradient is that of one
    value which all ranks hold: each rank takes its tiles' part.

    Args:
        tensor: One with elements.
        give: From a tile to a tensor of one shape for all tiles.
    """
    group = member_of(tensor, "a reduction")
    given = [give(tile) for tile in tensor.local_tiles() if tile.numel()]
    if given:
        mine = torch.stack(given)
    else:
        mine = give(zeros_after(tensor, (1,) * tensor.dim())).unsqueeze(0)[:0]
    holders = [tile.owners[0] for tile in tensor.tiling.tiles if not tile.box.empty]
    found: Tensor = _Held.apply(mine, group, holders)  # type: ignore[no-untyped-call]
    return found


class _Held(torch.autograd.Function):
    """From rows on the ranks that hold them to all rows on all ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: ProcessGroup, holders: list[int]) -> Tensor:
        taken = dict.fromkeys(group.global_ranks, 0)
        places = []
        for holder in holders:
            places.append((group.group_ranks[holder], taken[holder]))
            taken[holder] += 1
        most = max(taken.values())
        padded = mine.new_zeros((most, *mine.shape[1:]))
        padded[: len(mine)] = mine
        every = mine.new_empty((group.size() * most, *mine.shape[1:]))
        all_gather_into_tensor(every, padded, group)
        ctx.own = [i for i, (rank, _) in enumerate(places) if rank == group.rank()]
        return every[[rank * most + i for rank, i in places]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.own], None, None
