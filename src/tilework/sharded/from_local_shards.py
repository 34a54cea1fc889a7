"""Tensors of what each rank brings: all tell each other, so that what is wrong raises on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import Facts, agree_equal, check_equal
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank, resolve
from tilework.sharded import checks
from tilework.sharded.metadata import (
    Items,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.placement import check_rrefs, places
from tilework.sharded.specs import (
    ChunkShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)

_MISMATCH = "ShardedTensor {name} property does not match from different ranks!"


@dataclass(frozen=True)
class Joined:
    """What a tensor is made of."""

    spec: ShardingSpec
    metadata: ShardedTensorMetadata
    shards: list[Shard]


def join_shards(
    local_shards: Sequence[Shard], global_size: Sequence[Any], group: AnyGroup, init_rrefs: bool
) -> Joined:
    """See :meth:`ShardedTensor.init_from_local_shards`."""

    def make() -> dict[str, Any]:
        check_rrefs(init_rrefs, group)
        size = checks.flat_size(global_size)
        return {"global_size": list(size), **_facts(local_shards, group)}

    ranks, said = _gather(make, "init_from_local_shards", group)
    size, properties = torch.Size(said[0]["global_size"]), _common(ranks, said)
    shards = Items(ShardMetadata(*shard) for facts in said for shard in facts["shards"])
    metadata = ShardedTensorMetadata(shards, size, properties)
    checks.check_metadata(metadata)
    spec = infer_sharding_spec_from_shards_metadata(shards)
    if isinstance(spec, ChunkShardingSpec):
        metadata = spec.build_metadata(size, properties)  # the same as of any tensor cut so
    owned = checks.own_shards(local_shards, metadata, places(group, metadata.shards_metadata))
    return Joined(spec, metadata, owned)


def join_tensor(
    local_tensor: Tensor | None,
    spec: ShardingSpec,
    global_size: Sequence[Any],
    group: AnyGroup,
    init_rrefs: bool,
) -> Joined:
    """See :meth:`ShardedTensor.init_from_local_tensor`."""
    shards: list[Shard] = []

    def make() -> dict[str, Any]:
        check_rrefs(init_rrefs, group)
        if local_tensor is not None and not local_tensor.is_contiguous():
            raise ValueError(
                f"local_tensor is not a contiguous Tensor.: its strides are "
                f"{local_tensor.stride()}; call contiguous() first"
            )
        size = checks.flat_size(global_size)
        metadata = checks.metadata_by(spec, size, TensorProperties())
        shards.extend(_only_shard(local_tensor, metadata, group))
        told = {"global_size": list(size), "sharding_spec": checks.describe(metadata)}
        return {**told, **_facts(shards, group)}

    ranks, said = _gather(make, "init_from_local_tensor", group)
    metadata = spec.build_metadata(said[0]["global_size"], _common(ranks, said))
    return Joined(spec, metadata, shards)


def _only_shard(
    tensor: Tensor | None, metadata: ShardedTensorMetadata, group: AnyGroup
) -> list[Shard]:
    rank = get_rank()
    placed = zip(metadata.shards_metadata, places(group, metadata.shards_metadata), strict=True)
    mine = [shard for shard, (owner, _) in placed if owner == rank]
    if len(mine) != (tensor is not None):
        raise ValueError(
            f"the spec gives rank {rank} {len(mine)} shards, but local_tensor is "
            f"{'None' if tensor is None else 'one'}: use init_from_local_shards for several, and "
            f"None for none"
        )
    return [] if tensor is None else [Shard(tensor, mine[0])]


def _facts(local_shards: Sequence[Shard], group: AnyGroup) -> dict[str, Any]:
    """What this rank tells the others of its shards, once it has checked them."""
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
        found = checks.named(TensorProperties.create_from_tensor(shard.tensor))
        first = first or found
        for name, value in first.items():
            if found[name] != value:
                raise ValueError(
                    f"Local shards' tensor {name} property need to be the same on rank:{rank}! "
                    f"Found one with {name}={value}, another with {name}={found[name]}"
                )
    parts = [shard.metadata for shard in local_shards]
    shards = [(tuple(s.shard_offsets), tuple(s.shard_sizes), str(s.placement)) for s in parts]
    return {"properties": first, "shards": shards}


def _gather(make: Any, operation: str, group: AnyGroup) -> tuple[list[int], Sequence[Facts]]:
    """The ranks of the group and the facts of each, the same but for those of its own shards."""
    found = resolve(group)
    if isinstance(found, NonMember):
        raise ValueError(
            f"{operation}: rank {get_rank()} is not in the group of ranks "
            f"{list(found.global_ranks)}, and cannot know what they bring: call it there only"
        )
    said = agree_equal(make, group, _MISMATCH, own=("properties", "shards"))
    return get_process_group_ranks(group), said


def _common(ranks: Sequence[int], said: Sequence[Facts]) -> TensorProperties:
    """The properties of all shards of all ranks."""
    known = [(rank, facts["properties"]) for rank, facts in zip(ranks, said, strict=True)]
    known = [(rank, properties) for rank, properties in known if properties]
    if not known:
        raise ValueError(
            f"ShardedTensor have no local shards on all ranks: at least one of ranks {list(ranks)} "
            f"must bring one"
        )
    _, first = known[0]
    check_equal([facts for _, facts in known], [rank for rank, _ in known], _MISMATCH)
    return TensorProperties(
        getattr(torch, first["dtype"].removeprefix("torch.")),
        requires_grad=first["requires_grad"],
        pin_memory=first["pin_memory"],
    )
