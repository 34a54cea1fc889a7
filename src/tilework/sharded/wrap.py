"""New tensors of shards that are known to fit: on a given group, or on a tensor's. Local."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tilework.comm.world import AnyGroup, resolve
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.graph import keep_stand_in
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, ShardMap
from tilework.sharded.placement import Place
from tilework.sharded.specs import ShardingSpec

BaseT = TypeVar("BaseT", bound=ShardedTensorBase)


def assemble(
    cls: type[BaseT],
    spec: ShardingSpec,
    metadata: ShardedTensorMetadata,
    placed: Iterable[Place],
    shards: list[Shard],
    group: AnyGroup,
) -> BaseT:
    """A ``cls`` tensor on ``group``; ``placed`` has the owner and device of each shard."""
    owners = [owner for owner, _ in placed]
    return cls._assemble(spec, metadata, shards, ShardMap(metadata, owners), resolve(group))


def wrap_shards(
    operand: BaseT,
    spec: ShardingSpec,
    metadata: ShardedTensorMetadata,
    shard_map: ShardMap,
    shards: list[Shard],
) -> BaseT:
    """A tensor on the group of ``operand``, from parts that the caller knows to fit together."""
    return operand._assemble(spec, metadata, shards, shard_map, operand._process_group)


def wrap_results(
    operand: BaseT,
    results: Sequence[Tensor],
    device: torch.device | None = None,
    group: AnyGroup = None,
) -> BaseT:
    """A tensor sharded as ``operand``, of results for each of ``graph_tiles(operand)``.

    Args:
        operand: The tensor.
        results: Tensors of the sizes of the operand's tiles, in one dtype, and all or none in the
            graph.
        device: The type of device of all ranks' results, without an index; None: the operand's.
        group: The group; None: the operand's.
    """
    metadata, spec, first = operand._metadata, operand._sharding_spec, results[0]
    properties = replace(
        metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
    )
    metadata = replace(metadata, tensor_properties=properties)
    described = [shard.metadata for shard in operand._local_shards]
    if device is not None:
        metadata, spec = metadata.moved(device), spec.moved(device)
        described = [shard.moved(device) for shard in described]
    # A rank without shards has one result: the stand-in's.
    shards = [Shard(*pair) for pair in zip(results, described, strict=False)]
    process_group = operand._process_group if group is None else resolve(group)
    tensor = operand._assemble(spec, metadata, shards, operand._shard_map, process_group)
    if not shards:
        keep_stand_in(tensor, first)
    return tensor
