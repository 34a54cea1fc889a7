"""Comparisons of two tensors' values: one answer, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.comm.operations.internal import agree
from tilework.comm.world import NonMember
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.tiles import graph_tiles, same_layout
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def _compares(func: Callable[..., bool]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
        a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if not (isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor)):
            raise unsupported(
                func, args, kwargs, "both must be sharded: shard_tensor shards a plain one"
            )
        if a.process_group is not b.process_group:
            raise unsupported(func, args, kwargs, "both must be on one process group")
        others = {k: v for k, v in kwargs.items() if k not in ("input", "self", "other")}
        if a.shape != b.shape:
            if func in (torch.equal, Tensor.equal):
                return False
            raise unsupported(func, args, kwargs, "both must have one shape")
        if not same_layout(a, b):
            detached: Any = b.detach()
            b = detached.reshard(a.sharding_spec())
        tiles = zip(graph_tiles(a), graph_tiles(b), strict=True)

        def same_here() -> bool:
            return all(func(tile, other, *args[2:], **others) for tile, other in tiles)

        if isinstance(a.process_group, NonMember):
            return same_here()  # this rank has no tiles
        return all(agree(same_here, a.process_group))

    return handler


TABLE: dict[Callable[..., Any], Handler] = {
    func: _compares(func) for func in (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
}
