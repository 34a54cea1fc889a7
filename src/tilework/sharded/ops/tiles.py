"""Local tiles of operands, and sharded tensors of results computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import NonMember, current_world, get_rank
from tilework.sharded import checks
from tilework.sharded.checks import unsupported
from tilework.sharded.graph import graph_tiles as graph_tiles
from tilework.sharded.graph import keep_stand_in as keep_stand_in
from tilework.sharded.tensor import ShardedTensor
from tilework.sharded.wrap import wrap_results

OTHER_LAYOUT = (
    "both must be sharded alike, on the same ranks: reshard one to the other's sharding_spec()"
)
PLAIN_OPERAND = "a plain operand must be a number or a tensor without dims: shard_tensor shards it"


def no_elements(tensor: ShardedTensor, ndim: int = 1) -> Tensor:
    """An empty tensor with a place in the graph after the tensor's tiles on this rank."""
    return emptied(graph_tiles(tensor)[0], ndim)


def emptied(tile: Tensor, ndim: int) -> Tensor:
    """An empty tensor of ``ndim`` dims with a place in the graph after the tile."""
    flat = tile.reshape(-1)[:0]
    return flat.reshape((0,) * ndim) if ndim else flat.sum(dtype=tile.dtype)


def zeros_after(tensor: ShardedTensor, shape: Sequence[int]) -> Tensor:
    """Zeros of the tensor's dtype, with a place in the graph after the tiles on this rank."""
    zeros = torch.zeros(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    if not tensor.requires_grad:
        return zeros
    return zeros + no_elements(tensor).sum()


def wrap(operand: ShardedTensor, results: Sequence[Tensor]) -> ShardedTensor:
    """A tensor sharded as ``operand``, made of results of :func:`graph_tiles` on it."""
    kind = results[0].device.type
    return wrap_results(
        operand, results, None if kind == operand.device.type else torch.device(kind)
    )


def settle(operand: ShardedTensor) -> ShardedTensor:
    """``operand``, after the tiles have been written in place."""
    requires_grad = graph_tiles(operand)[0].requires_grad
    if requires_grad != operand.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(operand, requires_grad)
        operand._set_properties(requires_grad=requires_grad)
    return operand


class _ComparedLayouts:
    """The layouts that all ranks of a group have compared and found equal."""

    def __init__(self) -> None:
        self.of_group: WeakKeyDictionary[ProcessGroup, set[tuple[int, torch.dtype]]]
        self.of_group = WeakKeyDictionary()


def member_of(tensor: ShardedTensor, name: str) -> ProcessGroup:
    """The tensor's group, for an operation that needs all ranks of the group.

    A tensor is made without communication. Its layout is compared at the first use: that call is
    collective, later calls only look in a set.

    Raises:
        ValueError: This rank is not in the group, or another rank has another layout.
    """
    group = tensor.process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"{name}: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    known = current_world().state(_ComparedLayouts).of_group.setdefault(group, set())
    layout = (tensor.tiling.digest, tensor.dtype)
    if layout not in known:
        agree_equal(lambda: {"layout": checks.describe(tensor.metadata())}, group)
        known.add(layout)
    return group


def same_layout(a: ShardedTensor, b: ShardedTensor) -> bool:
    """True if both tensors have the same tiles on the same ranks."""
    if a is b:
        return True
    if a.process_group is not b.process_group or a.owners != b.owners:
        return False
    return a._metadata.shards_metadata is b._metadata.shards_metadata or a.tiling == b.tiling


def sharded_argument(func: Callable[..., Any], args: Any, kwargs: Any) -> ShardedTensor:
    """The first argument of a call.

    Raises:
        RuntimeError: It is not a sharded tensor.
    """
    tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, args, kwargs)
    return tensor
