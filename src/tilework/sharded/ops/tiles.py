"""What every operator is made of: a rank's tiles in, a sharded tensor of their results out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import NonMember, current_world, get_rank
from tilework.layout import Box
from tilework.sharded import checks
from tilework.sharded.checks import unsupported
from tilework.sharded.graph import graph_tiles as graph_tiles
from tilework.sharded.graph import keep_stand_in as keep_stand_in
from tilework.sharded.metadata import Items, Shard, ShardedTensorMetadata, ShardMetadata
from tilework.sharded.specs import (
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)
from tilework.sharded.tensor import ShardedTensor

OTHER_LAYOUT = (
    "both must be cut alike, on the same ranks: reshard one to the other's sharding_spec()"
)
PLAIN_OPERAND = "a plain operand must be a number or a tensor without dims: shard_tensor cuts it"


def no_elements(tensor: ShardedTensor, ndim: int = 1) -> Tensor:
    """No elements, but a place in the graph after the tensor's tiles on this rank."""
    return _emptied(graph_tiles(tensor)[0], ndim)


def _emptied(tile: Tensor, ndim: int) -> Tensor:
    flat = tile.reshape(-1)[:0]
    return flat.reshape((0,) * ndim) if ndim else flat.sum(dtype=tile.dtype)


def zeros_after(tensor: ShardedTensor, shape: Sequence[int]) -> Tensor:
    """Zeros of the tensor's dtype, with a place in the graph after its tiles on this rank."""
    zeros = torch.zeros(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    if not tensor.requires_grad:
        return zeros
    return zeros + no_elements(tensor).sum()


def wrap(operand: ShardedTensor, results: Sequence[Tensor]) -> ShardedTensor:
    """A tensor cut as ``operand``, of what came of its :func:`graph_tiles`."""
    kind = results[0].device.type
    return operand.of_results(results, None if kind == operand.device.type else torch.device(kind))


def settle(operand: ShardedTensor) -> ShardedTensor:
    """``operand``, after its tiles have been written in place."""
    requires_grad = graph_tiles(operand)[0].requires_grad
    if requires_grad != operand.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(operand, requires_grad)
        operand._set_properties(requires_grad=requires_grad)
    return operand


def recut(
    tensor: ShardedTensor,
    size: Sequence[int],
    place: Callable[[Box], Box | None],
    apply: Callable[[Tensor, Box], Tensor],
    stand_in: Tensor | None = None,
) -> ShardedTensor:
    """A tensor whose tiles are made from this one's, each on the rank where it is.

    Args:
        tensor: The tensor.
        size: The result's.
        place: From a tile's box to that of its result; None: nothing is left of it.
        apply: From a tile and its box to its result.
        stand_in: What came of this rank's, if it has one and the dtype changes.
    """
    metadata = tensor._metadata
    boxes = [place(shard.box) for shard in metadata.shards_metadata]
    left = [(i, box) for i, box in enumerate(boxes) if box is not None]
    shards = [
        ShardMetadata(box.offsets, box.sizes, metadata.shards_metadata[i].placement)
        for i, box in left
    ]
    described = dict(zip((i for i, _ in left), shards, strict=True))
    local = [
        Shard(apply(shard.tensor, shard.metadata.box), described[i])
        for i, shard in zip(tensor.tiling.of(get_rank()), tensor.local_shards(), strict=True)
        if i in described
    ]
    if local:
        first = local[0].tensor
    else:
        source = graph_tiles(tensor)[0] if stand_in is None else stand_in
        first = _emptied(source, len(size))
    properties = replace(
        metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
    )
    whole = replace(
        metadata,
        shards_metadata=Items(shards),
        size=torch.Size(size),
        tensor_properties=properties,
    )
    made = tensor.recut(_spec_of(whole), whole, [tensor.owners[i] for i, _ in left], local)
    if not local:
        keep_stand_in(made, first)
    return made


def _spec_of(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """Chunks, if they come in that order; else the boxes."""
    shards = metadata.shards_metadata
    spec = infer_sharding_spec_from_shards_metadata(shards)
    if spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata == shards:
        return spec
    return EnumerableShardingSpec(shards)


class _Compared:
    """The layouts of which all ranks of a group have found that they have the same."""

    def __init__(self) -> None:
        self.of_group: WeakKeyDictionary[ProcessGroup, set[tuple[int, torch.dtype]]]
        self.of_group = WeakKeyDictionary()


def member_of(tensor: ShardedTensor, name: str) -> ProcessGroup:
    """The tensor's group, for what needs all of its ranks.

    A tensor is made without communication, so its layout is compared when it is first used:
    collective then, a set's look-up later.

    Raises:
        ValueError: This rank is not in it, or another rank has another layout.
    """
    group = tensor.process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"{name}: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    known = current_world().state(_Compared).of_group.setdefault(group, set())
    layout = (tensor.tiling.digest, tensor.dtype)
    if layout not in known:
        agree_equal(lambda: {"layout": checks.describe(tensor.metadata())}, group)
        known.add(layout)
    return group


def same_layout(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether each tile of one has its like in the other, on the same rank."""
    if a is b:
        return True
    if a.process_group is not b.process_group or a.owners != b.owners:
        return False
    one, two = a._metadata, b._metadata
    return one.shards_metadata is two.shards_metadata or a.tiling == b.tiling


def sharded_argument(func: Callable[..., Any], args: Any, kwargs: Any) -> ShardedTensor:
    """The first argument, which must be the sharded one."""
    tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, args, kwargs)
    return tensor
