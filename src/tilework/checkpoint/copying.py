"""Copies of elements between tensors of any layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.save_planning import cut_box
from tilework.comm.operations.internal import broadcast, device_of
from tilework.comm.world import get_default_group, get_rank
from tilework.dtensor import DTensor
from tilework.dtensor.internal import is_torch_dtensor
from tilework.layout import Box
from tilework.layout.internal import whole_box
from tilework.tiled import TiledTensor

#: The maximum of bytes under way at once.
PIECE_BYTES = 32 << 20


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy the elements of ``value`` into ``target``.

    Collective over the ranks of ``value`` if it is sharded in another way than ``target``.

    Args:
        target: A tensor of any layout that is not partial.
        value: A tensor of the same shape: whole on each rank, or sharded.

    Example:
        >>> target = torch.zeros(2)
        >>> copy_into(target, torch.tensor([1, 2]))
        >>> target
        tensor([1., 2.])
    """
    target, value = _ours(target), _ours(value)
    if isinstance(value, TiledTensor):
        if isinstance(target, TiledTensor) and target.tiling == value.tiling:
            for own, given in zip(target.local_tiles(), value.local_tiles(), strict=True):
                own.detach().copy_(given.detach())
            return
        value = value.full_tensor().detach()  # type: ignore[attr-defined]
    for box, tile in _tiles(target):
        tile.copy_(value.detach()[box.slices])


def broadcast_into(target: Tensor, value: Any) -> None:
    """Send the elements that rank 0 has into ``target`` on all ranks. Collective; in pieces.

    Args:
        target: A tensor of any layout that is not partial.
        value: Has the ``shape`` and ``dtype`` of the elements, and on rank 0 also the ``tensor``.
    """
    group = get_default_group()
    tiles = list(_tiles(_ours(target)))
    for box in cut_box(whole_box(value.shape), value.dtype.itemsize, PIECE_BYTES):
        piece = torch.empty(box.sizes, dtype=value.dtype, device=device_of(group))
        if get_rank() == 0:
            piece.copy_(value.tensor.detach()[box.slices])
        broadcast(piece, group_src=group.global_ranks.index(0), group=group)
        for own, tile in tiles:
            shared = own.intersection(box)
            if shared is not None:
                tile[shared.relative_to(own).slices] = piece[shared.relative_to(box).slices]


def _ours(tensor: Tensor) -> Tensor:
    return DTensor.from_torch(tensor) if is_torch_dtensor(tensor) else tensor


def _tiles(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    if not isinstance(tensor, TiledTensor):
        return [(whole_box(tuple(tensor.shape)), tensor.detach())]
    boxes = tensor.tiling.boxes_of(get_rank())
    return list(zip(boxes, [tile.detach() for tile in tensor.local_tiles()], strict=True))
