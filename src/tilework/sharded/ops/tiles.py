"""Local tiles of operands, and sharded tensors of results computed from them.

Layouts of results are cached by operator, layout of the operand and static arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import NonMember, current_world, get_rank
from tilework.layout import Box
from tilework.sharded import checks
from tilework.sharded.base import graph_tiles as graph_tiles
from tilework.sharded.base import keep_stand_in as keep_stand_in
from tilework.sharded.base import with_properties, wrap_results
from tilework.sharded.checks import unsupported
from tilework.sharded.metadata import Items, Shard, ShardedTensorMetadata, ShardMap, ShardMetadata
from tilework.sharded.specs import (
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.rules import dim_at

T = TypeVar("T")

OTHER_LAYOUT = (
    "both must have equal shardings on the same ranks: reshard one to the other's sharding_spec()"
)


def no_elements(tensor: ShardedTensor, ndim: int = 1) -> Tensor:
    """An empty tensor that depends, in the graph, on the tensor's tiles on this rank."""
    return emptied(graph_tiles(tensor)[0], ndim)


def emptied(tile: Tensor, ndim: int) -> Tensor:
    """An empty tensor of ``ndim`` dims that depends, in the graph, on the tile."""
    flat = tile.reshape(-1)[:0]
    return flat.reshape((0,) * ndim) if ndim else flat.sum(dtype=tile.dtype)


def zeros_after(tensor: ShardedTensor, shape: Sequence[int]) -> Tensor:
    """Zeros of the tensor's dtype that depend, in the graph, on the tiles on this rank."""
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
    """The first argument of a call, which must be a sharded tensor."""
    tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, args, kwargs)
    return tensor


def options_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments after the tensor, by name."""
    options = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    if "axis" in options:
        options["dim"] = options.pop("axis")
    return options


def dims_of(tensor: Tensor, dim: Any) -> tuple[int, ...] | None:
    """The dims of an argument ``dim``, ascending, counted from the first; None: all of them."""
    dims = () if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(sorted({dim_at(dim, tensor.dim()) for dim in dims})) or None


# -- layouts of results ------------------------------------------------------------------------

#: The maximum of entries in the cache that tensors computed from one tensor share.
_MOST_CACHED = 1024


@dataclass(frozen=True, eq=False, slots=True)
class ResultLayout:
    """The layout of a result whose tiles are computed from a tensor's tiles, on the same ranks.

    ``numbers`` has for each tile of the tensor the number of the result's tile, or None.
    """

    metadata: ShardedTensorMetadata
    spec: ShardingSpec
    shard_map: ShardMap
    numbers: tuple[int | None, ...]


def cached(tensor: ShardedTensor, key: Hashable, make: Callable[[], T]) -> T:
    """The result of ``make``, which depends only on the key and on the tensor's layout."""
    shard_map, shards = tensor._shard_map, tensor._metadata.shards_metadata
    entry = shard_map.results.get((shard_map, key))
    # Tensors with the same shard map have other placements after a move to another device.
    if entry is None or entry[0] is not shards:
        if len(shard_map.results) >= _MOST_CACHED:
            shard_map.results.clear()
        entry = shard_map.results[shard_map, key] = shards, make()
    result: T = entry[1]
    return result


def layout_of_boxes(
    tensor: ShardedTensor, size: Sequence[int], boxes: Sequence[Box | None]
) -> ResultLayout:
    """The layout of a result with these boxes, on the ranks of the tensor's tiles; None: no box."""
    metadata = tensor._metadata
    shards: list[ShardMetadata] = []
    owners: list[int] = []
    numbers: list[int | None] = []
    for shard, owner, box in zip(metadata.shards_metadata, tensor.owners, boxes, strict=True):
        numbers.append(None if box is None else len(shards))
        if box is not None:
            shards.append(ShardMetadata(box.offsets, box.sizes, shard.placement))
            owners.append(owner)
    result = replace(metadata, shards_metadata=Items(shards), size=torch.Size(size))
    shard_map = ShardMap(result, owners, tensor._shard_map.results)
    return ResultLayout(result, _spec_of(result), shard_map, tuple(numbers))


def layout_of(tensor: ShardedTensor) -> ResultLayout:
    """The layout of the tensor."""
    numbers = tuple(range(len(tensor._metadata.shards_metadata)))
    return ResultLayout(tensor._metadata, tensor._sharding_spec, tensor._shard_map, numbers)


def boxes_of(tensor: ShardedTensor) -> list[Box]:
    """The box of each of the tensor's shards."""
    return [shard.box for shard in tensor._metadata.shards_metadata]


def _spec_of(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """A chunk spec if the shards are chunks in order; else the boxes."""
    shards = metadata.shards_metadata
    spec = infer_sharding_spec_from_shards_metadata(shards)
    if spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata == shards:
        return spec
    return EnumerableShardingSpec(shards)


def of_tiles(
    tensor: ShardedTensor, layout: ResultLayout, results: Sequence[Tensor | None]
) -> ShardedTensor:
    """A tensor of results computed from another tensor's tiles, on the same ranks. Local.

    A part of a result is taken where the shard is empty; None: nothing is left of the tile.
    """
    local, shards = [], layout.metadata.shards_metadata
    for i, result in zip(tensor.tiling.of(get_rank()), results, strict=False):
        number = layout.numbers[i]
        if number is not None and result is not None:
            sizes = shards[number].shard_sizes
            part = result[tuple(map(slice, sizes))] if 0 in sizes else result
            local.append(Shard(part, shards[number]))
    if local:
        first = local[0].tensor
    else:
        source = next((result for result in results if result is not None), graph_tiles(tensor)[0])
        first = emptied(source, len(layout.metadata.size))
    metadata = with_properties(layout.metadata, tensor._metadata.tensor_properties, first)
    made = tensor._assemble(layout.spec, metadata, local, layout.shard_map, tensor._process_group)
    if not local:
        keep_stand_in(made, first)
    return made
