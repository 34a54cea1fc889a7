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
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, ShardMap, TensorProperties
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


def with_properties(
    metadata: ShardedTensorMetadata, properties: TensorProperties, like: Tensor
) -> ShardedTensorMetadata:
    """The metadata with these properties, and the dtype and ``requires_grad`` of a tensor."""
    dtype, requires_grad = like.dtype, like.requires_grad
    if properties.dtype != dtype or properties.requires_grad != requires_grad:
        properties = replace(properties, dtype=dtype, requires_grad=requires_grad)
    if metadata.tensor_properties is properties:
        return metadata
    return replace(metadata, tensor_properties=properties)


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
    metadata = with_properties(metadata, metadata.tensor_properties, first)
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
