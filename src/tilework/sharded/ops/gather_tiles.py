"""Values that are replicated: results for the tiles, gathered to every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_gather_into_tensor
from tilework.sharded.ops.tiles import member_of, zeros_after
from tilework.sharded.tensor import ShardedTensor


def gather_from_tiles(tensor: ShardedTensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """The results of ``compute`` for each tile that has elements, stacked, on every rank.

    Collective: one all_gather, of as many results as the rank with the most tiles has. The gathered
    value is replicated: each rank takes its own tiles' part of the gradient.

    Args:
        tensor: A tensor with elements.
        compute: Maps a tile to a tensor of a shape that is the same for all tiles.
    """
    group = member_of(tensor, "a reduction")
    results = [compute(tile) for tile in tensor.local_tiles() if tile.numel()]
    if results:
        local = torch.stack(results)
    else:
        local = compute(zeros_after(tensor, (1,) * tensor.dim())).unsqueeze(0)[:0]
    owners = [tile.owners[0] for tile in tensor.tiling.tiles if not tile.box.empty]
    gathered: Tensor = _GatherRows.apply(local, group, owners)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """Gathers all rows to all ranks, in the order of ``owners``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup, owners: list[int]) -> Tensor:
        counts = dict.fromkeys(group.global_ranks, 0)
        places = []
        for owner in owners:
            places.append((group.group_ranks[owner], counts[owner]))
            counts[owner] += 1
        most = max(counts.values())
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: len(local)] = local
        gathered = local.new_empty((group.size() * most, *local.shape[1:]))
        all_gather_into_tensor(gathered, padded, group)
        ctx.own = [i for i, (rank, _) in enumerate(places) if rank == group.rank()]
        return gathered[[rank * most + i for rank, i in places]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.own], None, None
