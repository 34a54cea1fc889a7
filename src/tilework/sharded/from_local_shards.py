"""Sharded tensors of each rank's local shards, compared so that all ranks succeed or raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilework.comm.operations.internal import Facts, agree_equal, check_equal
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank, resolve
from tilework.sharded import checks
from tilework.sharded.base import ShardedTensorBase, assemble
from tilework.sharded.checks import check_rrefs, places
from tilework.sharded.metadata import (
    Items,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.specs import (
    ChunkShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)

BaseT = TypeVar("BaseT", bound=ShardedTensorBase)

_MISMATCH = "ShardedTensor {name} property does not match from different ranks!"


def from_local_shards(
    cls: type[BaseT],
    local_shards: Sequence[Shard],
    global_size: Sequence[Any],
    group: AnyGroup,
    init_rrefs: bool,
) -> BaseT:
    """See :meth:`ShardedTensor.init_from_local_shards`; RRefs are made by the caller."""

    def facts() -> Facts:
        check_rrefs(init_rrefs, group)
        size = checks.flat_size(global_size)
        return {"global_size": list(size), **_facts(local_shards, group)}

    ranks, by_rank = _agree_facts(facts, "init_from_local_shards", group)
    size, properties = torch.Size(by_rank[0]["global_size"]), _common_properties(ranks, by_rank)
    shards = Items(ShardMetadata(*shard) for facts in by_rank for shard in facts["shards"])
    metadata = ShardedTensorMetadata(shards, size, properties)
    checks.check_metadata(metadata)
    spec = infer_sharding_spec_from_shards_metadata(shards)
    if isinstance(spec, ChunkShardingSpec):
        metadata = spec.build_metadata(size, properties)  # the same as for any tensor of this spec
    placed = places(group, metadata.shards_metadata)
    owned = checks.own_shards(local_shards, metadata, placed)
    return assemble(cls, spec, metadata, placed, owned, group)


def from_local_tensor(
    cls: type[BaseT],
    local_tensor: Tensor | None,
    spec: ShardingSpec,
    global_size: Sequence[Any],
    group: AnyGroup,
    init_rrefs: bool,
) -> BaseT:
    """See :meth:`ShardedTensor.init_from_local_tensor`; RRefs are made by the caller."""
    shards: list[Shard] = []

    def facts() -> Facts:
        check_rrefs(init_rrefs, group)
        if local_tensor is not None and not local_tensor.is_contiguous():
            raise ValueError(
                f"local_tensor is not a contiguous Tensor.: its strides are "
                f"{local_tensor.stride()}; call contiguous() first"
            )
        size = checks.flat_size(global_size)
        metadata = checks.metadata_by(spec, size, TensorProperties())
        shards.extend(_only_shard(local_tensor, metadata, group))
        layout = {"global_size": list(size), "sharding_spec": checks.describe(metadata)}
        return {**layout, **_facts(shards, group)}

    ranks, by_rank = _agree_facts(facts, "init_from_local_tensor", group)
    metadata = spec.build_metadata(by_rank[0]["global_size"], _common_properties(ranks, by_rank))
    placed = places(group, metadata.shards_metadata)
    return assemble(cls, spec, metadata, placed, shards, group)


def _only_shard(
    tensor: Tensor | None, metadata: ShardedTensorMetadata, group: AnyGroup
) -> list[Shard]:
    rank = get_rank()
    placed = zip(metadata.shards_metadata, places(group, metadata.shards_metadata), strict=True)
    own = [shard for shard, (owner, _) in placed if owner == rank]
    if len(own) != (tensor is not None):
        raise ValueError(
            f"the spec gives rank {rank} {len(own)} shards, but local_tensor is "
            f"{'None' if tensor is None else 'a tensor'}: pass None on a rank without shards, and "
            f"use init_from_local_shards for several shards on a rank"
        )
    return [] if tensor is None else [Shard(tensor, own[0])]


def _facts(local_shards: Sequence[Shard], group: AnyGroup) -> dict[str, Any]:
    rank = get_rank()
    if not isinstance(local_shards, Sequence) or not all(
        isinstance(s, Shard) for s in local_shards
    ):
        raise TypeError(f"local shards are a list of Shard, got {local_shards!r:.200}")
    placed = places(group, [shard.metadata for shard in local_shards])
    first: dict[str, Any] = {}
    for shard, (owner, _) in zip(local_shards, placed, strict=True):
        checks.check_format_of(shard)
        if owner != rank:
            raise ValueError(
                f"Local shard metadata's rank does not match with the rank in its process group! "
                f"{shard.metadata.placement} is not rank {rank}"
            )
        properties = checks.named(TensorProperties.create_from_tensor(shard.tensor))
        first = first or properties
        for name, value in first.items():
            if properties[name] != value:
                raise ValueError(
                    f"Local shards' tensor {name} property need to be the same on rank:{rank}! "
                    f"Found one with {name}={value}, another with {name}={properties[name]}"
                )
    described = [shard.metadata for shard in local_shards]
    shards = [(tuple(s.shard_offsets), tuple(s.shard_sizes), str(s.placement)) for s in described]
    return {"properties": first, "shards": shards}


def _agree_facts(
    facts: Callable[[], Facts], operation: str, group: AnyGroup
) -> tuple[list[int], Sequence[Facts]]:
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        raise ValueError(
            f"{operation}: rank {get_rank()} is not in the group of ranks "
            f"{list(resolved.global_ranks)}, and cannot know their shards: call it on them only"
        )
    by_rank = agree_equal(facts, group, _MISMATCH, own=("properties", "shards"))
    return get_process_group_ranks(group), by_rank


def _common_properties(ranks: Sequence[int], by_rank: Sequence[Facts]) -> TensorProperties:
    known = {
        rank: facts["properties"]
        for rank, facts in zip(ranks, by_rank, strict=True)
        if facts["properties"]
    }
    if not known:
        raise ValueError(
            f"ShardedTensor have no local shards on all ranks: at least one of ranks {list(ranks)} "
            f"must bring one"
        )
    check_equal(list(known.values()), list(known), _MISMATCH)
    first = next(iter(known.values()))
    return TensorProperties(
        getattr(torch, first["dtype"].removeprefix("torch.")),
        requires_grad=first["requires_grad"],
        pin_memory=first["pin_memory"],
    )
