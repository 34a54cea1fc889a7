"""Whether shards, metadata and arguments fit together; on one rank, and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.comm.world import AnyGroup, get_process_group_ranks, get_rank
from tilework.layout import check_boxes
from tilework.sharded.metadata import (
    Items,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.placement import parse_and_validate_remote_device
from tilework.sharded.specs import ShardingSpec


def flat_size(size: Sequence[int | Sequence[int]]) -> torch.Size:
    """The shape that a creation function's arguments give: numbers, or one sequence.

    Raises:
        TypeError: They are neither.
    """
    given: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if isinstance(given, str) or not all(isinstance(extent, int) for extent in given):
        raise TypeError(f"a size is a sequence of ints, got {size!r}")
    return torch.Size(given)


def check_formats(layout: torch.layout, memory_format: torch.memory_format) -> None:
    """Whether shards can have this layout and format."""
    if layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported for sharded tensors, got {layout}"
        )
    if memory_format != torch.contiguous_format:
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported for sharded "
            f"tensors, got {memory_format}"
        )


def empty_shard(shard: ShardMetadata, device: torch.device, properties: TensorProperties) -> Tensor:
    """Memory for a shard."""
    # Pinning serves an accelerator; without one torch has no pinned memory to give.
    pin = properties.pin_memory and torch.accelerator.is_available()
    return torch.empty(
        tuple(shard.shard_sizes),
        dtype=properties.dtype,
        device=device,
        requires_grad=properties.requires_grad,
        pin_memory=pin,
    )


def check_metadata(metadata: ShardedTensorMetadata) -> None:
    """Whether the metadata of a whole tensor fits itself."""
    if not metadata.shards_metadata:
        raise ValueError("shards_metadata must not be empty: list all shards of the tensor")
    check_formats(metadata.tensor_properties.layout, metadata.tensor_properties.memory_format)
    check_boxes(tuple(metadata.size), [shard.box for shard in metadata.shards_metadata])


def own_shards(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: AnyGroup
) -> list[Shard]:
    """``local_shards`` in the metadata's order, if they are what it gives this rank."""
    rank = get_rank()
    mine = [
        shard
        for shard in metadata.shards_metadata
        if parse_and_validate_remote_device(group, shard.placement)[0] == rank
    ]
    if len(local_shards) != len(mine):
        raise ValueError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({len(mine)}) on rank ({rank})"
        )
    given = {shard.metadata.box: shard for shard in local_shards}
    missing = [shard for shard in mine if shard.box not in given]
    if missing:
        raise ValueError(
            f"rank {rank} was given shards at {[str(box) for box in given]}, but by "
            f"sharded_tensor_metadata it has one at {missing[0].box}"
        )
    properties = metadata.tensor_properties
    for shard in local_shards:
        _check_shard(shard, rank, shard.metadata.placement and rank)
        for name, expected in _named(properties).items():
            found = _named(TensorProperties.create_from_tensor(shard.tensor))[name]
            if found != expected and not (name == "pin_memory" and expected):
                raise ValueError(
                    f"Local shard tensor's {name} does not match sharded_tensor_metadata on rank "
                    f"{rank}: found {name}={found}, expected {expected}"
                )
    return [given[shard.box] for shard in mine]


# -- between ranks -----------------------------------------------------------------------------


def gather_metadata(
    local_shards: Sequence[Shard], size: torch.Size, group: AnyGroup
) -> ShardedTensorMetadata:
    """The metadata of the tensor to which each rank brings its own shards. Collective."""
    said = agree(lambda: _local_facts(local_shards, size, group), group)
    if not said:  # outside the group
        return ShardedTensorMetadata(Items(s.metadata for s in local_shards), size)
    ranks = get_process_group_ranks(group)
    known = [(rank, facts) for rank, facts in zip(ranks, said, strict=True) if facts]
    if not known:
        raise ValueError(
            "init_from_local_shards: the ranks of the group have no local shards on all ranks; at "
            "least one must bring a shard"
        )
    first_rank, first = known[0]
    for rank, facts in known[1:]:
        for name, value in first["properties"].items():
            if facts["properties"][name] != value:
                raise ValueError(
                    f"ShardedTensor {name} property does not match from different ranks! Found "
                    f"{name}={value} on rank {first_rank}, and "
                    f"{name}={facts['properties'][name]} on rank {rank}"
                )
    shards = Items(ShardMetadata(*shard) for _, facts in known for shard in facts["shards"])
    properties = first["properties"]
    metadata = ShardedTensorMetadata(
        shards,
        size if not local_shards else torch.Size(properties["global_size"]),
        TensorProperties(
            getattr(torch, properties["dtype"].removeprefix("torch.")),
            requires_grad=properties["requires_grad"],
            pin_memory=properties["pin_memory"],
        ),
    )
    check_metadata(metadata)
    return metadata


def _local_facts(
    local_shards: Sequence[Shard], size: torch.Size, group: AnyGroup
) -> dict[str, Any]:
    """What this rank tells the others of its shards, once it has checked them."""
    rank = get_rank()
    if not local_shards:
        return {}
    expected: dict[str, Any] | None = None
    for shard in local_shards:
        owner, _ = parse_and_validate_remote_device(group, shard.metadata.placement)
        _check_shard(shard, rank, owner)
        found = _named(TensorProperties.create_from_tensor(shard.tensor))
        expected = expected or found
        for name, value in expected.items():
            if found[name] != value:
                raise ValueError(
                    f"Local shards' tensor {name} property need to be the same on rank:{rank}! "
                    f"Found one with {name}={value}, another with {name}={found[name]}"
                )
    shards = [
        (list(s.metadata.shard_offsets), list(s.metadata.shard_sizes), str(s.metadata.placement))
        for s in local_shards
    ]
    return {"properties": {"global_size": list(size), **(expected or {})}, "shards": shards}


def _named(properties: TensorProperties) -> dict[str, Any]:
    return {
        "dtype": str(properties.dtype),
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
    }


def _check_shard(shard: Shard, rank: int, owner: int | None) -> None:
    # Before the question of contiguity, which a sparse tensor cannot answer.
    check_formats(shard.tensor.layout, torch.contiguous_format)
    if not shard.tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported for sharded "
            f"tensors: the shard at {shard.metadata.box} has strides {shard.tensor.stride()}"
        )
    if owner != rank:
        raise ValueError(
            f"Local shard metadata's rank does not match with the rank in its process group: "
            f"{shard.metadata.placement} is not rank {rank}"
        )


def gather_one_shard(
    local_tensor: Tensor, spec: ShardingSpec, size: torch.Size, group: AnyGroup
) -> Shard:
    """This rank's tensor as the one shard that the spec gives it. Collective."""
    found: list[Shard] = []

    def make() -> list[Any]:
        if not local_tensor.is_contiguous():
            raise ValueError(
                f"local_tensor is not a contiguous Tensor.: its strides are "
                f"{local_tensor.stride()}; call contiguous() first"
            )
        metadata = spec.build_metadata(size, TensorProperties.create_from_tensor(local_tensor))
        mine = [
            shard
            for shard in metadata.shards_metadata
            if parse_and_validate_remote_device(group, shard.placement)[0] == get_rank()
        ]
        if len(mine) != 1:
            raise ValueError(
                f"the spec gives rank {get_rank()} {len(mine)} shards, but one local tensor makes "
                f"one: use init_from_local_shards"
            )
        found.append(Shard(local_tensor, mine[0]))
        return [str(local_tensor.dtype), local_tensor.requires_grad, list(size), repr(spec)]

    said = agree(make, group)
    names = ("dtype", "requires_grad", "global_size", "sharding_spec")
    for rank, other in zip(get_process_group_ranks(group), said, strict=True):
        for name, one, two in zip(names, said[0], other, strict=True):
            if one != two:
                raise ValueError(
                    f"ShardedTensor {name} property does not match from different ranks! Found "
                    f"{one} on rank {get_process_group_ranks(group)[0]}, and {two} on rank {rank}"
                )
    return found[0]


def unsupported(func: Callable[..., Any], args: Any, kwargs: Any, hint: str = "") -> RuntimeError:
    """The error for an operator that sharded tensors do not have."""
    name = getattr(func, "__name__", str(func))
    hint = hint or "use its local shards, or full_tensor() for a plain one"
    return RuntimeError(
        f"torch function '{name}', with args: {args} and kwargs: {kwargs} ({hint}) "
        f"not supported for ShardedTensor!"
    )
