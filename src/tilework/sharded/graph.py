"""Local tiles in the autograd graph, also on a rank without shards.

A rank without tiles has a stand-in: an empty tile with the tensor's dtype and a place in the graph.
Thus each rank gets the same dtype, the same ``requires_grad`` and the same errors, and takes part
in all communication, forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.sharded.base import ShardedTensorBase


def graph_tiles(tensor: ShardedTensorBase) -> list[Tensor]:
    """This rank's tiles; if it has none, a list of the stand-in, an empty tile in the graph."""
    return tensor.local_tiles() or [_stand_in(tensor)]


def _stand_in(tensor: ShardedTensorBase) -> Tensor:
    shards, stand_in = tensor.__dict__.get("_stand_in", (None, None))
    # A reshard or a change of dtype has given the tensor other shards.
    if shards is not tensor._local_shards:
        stand_in = torch.zeros(
            (0,) * tensor.dim(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        keep_stand_in(tensor, stand_in)
    assert isinstance(stand_in, Tensor)
    return stand_in


def keep_stand_in(tensor: ShardedTensorBase, stand_in: Tensor) -> None:
    """Store ``stand_in``, an empty tile that holds the tensor's place in the autograd graph."""
    tensor.__dict__["_stand_in"] = (tensor._local_shards, stand_in)
