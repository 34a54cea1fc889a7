"""Checks that shards, metadata and arguments fit together; and the owners of shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank, resolve
from tilework.layout import Box, check_boxes
from tilework.mesh.internal import check_device_is_there
from tilework.sharded.metadata import (
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)

#: The global rank that owns a shard, and the device as that rank sees it.
Place = tuple[int, torch.device]


def parse_and_validate_remote_device(
    group: AnyGroup, remote_device: RemoteDevice | None
) -> tuple[int, torch.device]:
    """The global rank and the device of a placement; a worker's name is looked up.

    Local; not collective.

    Raises:
        ValueError: There is no placement, the rank is not in the group, no worker has the name, or
            the placement has neither a rank nor a name.
        RuntimeError: It names a worker, and :func:`tilework.rpc.init_rpc` was not called.

    Example: ``parse_and_validate_remote_device(None, RemoteDevice("rank:1/cpu"))``.
    """
    return _place(remote_device, _ranks_of(group))


def places(group: AnyGroup, shards: Iterable[ShardMetadata]) -> list[Place]:
    """The owner and device of each shard, as from :func:`parse_and_validate_remote_device`."""
    ranks = _ranks_of(group)
    return [_place(shard.placement, ranks) for shard in shards]


def _ranks_of(group: AnyGroup) -> Collection[int] | None:
    """The group's ranks; None where this rank cannot know them."""
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        return resolved.global_ranks or None
    ranks = get_process_group_ranks(resolved)
    consecutive = range(len(ranks))
    return consecutive if ranks == list(consecutive) else ranks


def _place(place: RemoteDevice | None, ranks: Collection[int] | None) -> Place:
    if place is None:
        raise ValueError("remote device is None: give the shard a placement such as 'rank:0/cpu'")
    worker, rank = place.worker_name(), place.rank()
    if worker is not None:
        from tilework.sharded import remote

        rank = remote.rank_of_worker(worker)
    if rank is None:
        raise ValueError(f"remote device {place} does not name a rank: write 'rank:<rank>/{place}'")
    if ranks is not None and rank not in ranks:
        raise ValueError(
            f"Global rank {rank} does not exist in input process group: its ranks are {list(ranks)}"
        )
    return rank, place.device()


def check_rrefs(init_rrefs: bool, group: AnyGroup = None) -> None:
    """Raise if RRefs to shards are asked for, and the ranks of ``group`` cannot make them."""
    if init_rrefs:
        from tilework.sharded import remote

        remote.check_ready(group)


# -- arguments, metadata and shards ------------------------------------------------------------


T = TypeVar("T")


def flat_size(size: Sequence[int | Sequence[int]]) -> torch.Size:
    """The shape that the arguments ``size`` mean: several numbers, or one sequence of numbers."""
    extents: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if isinstance(extents, str) or not all(isinstance(extent, int) for extent in extents):
        raise TypeError(f"size must be a sequence of ints, got {size!r}")
    return torch.Size(extents)


def check_formats(layout: torch.layout, memory_format: torch.memory_format) -> None:
    """Raise ValueError unless the layout is strided and the memory format contiguous."""
    if layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported for sharded tensors, got {layout}"
        )
    if memory_format != torch.contiguous_format:
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported for sharded "
            f"tensors, got {memory_format}"
        )


def check_spec(spec: object) -> ShardingSpec:
    """``spec`` itself; raise ValueError if it is not a sharding spec."""
    if not isinstance(spec, ShardingSpec):
        kind = type(spec)
        home = "" if kind.__module__ == "builtins" else f" (of {kind.__module__})"
        raise ValueError(
            f"Expecting ShardingSpec but got: {kind.__name__}{home}; make a ChunkShardingSpec or "
            f"an EnumerableShardingSpec of tilework.sharded"
        )
    return spec


def new_shards(
    metadata: ShardedTensorMetadata,
    places: Sequence[Place],
    rank: int,
    fill: Callable[[Shard], object] | None,
) -> list[Shard]:
    """The new shards of ``rank``, which ``places`` puts on devices; ``fill`` writes to each."""
    shards = [
        Shard(_new_tensor(shard, device, metadata.tensor_properties), shard)
        for shard, (owner, device) in zip(metadata.shards_metadata, places, strict=True)
        if owner == rank
    ]
    if fill is not None:
        with torch.no_grad():
            for shard in shards:
                fill(shard)
    return shards


def _new_tensor(shard: ShardMetadata, device: torch.device, properties: TensorProperties) -> Tensor:
    check_device_is_there(device.type, "a shard")
    # Without an accelerator torch has no pinned memory.
    pin = properties.pin_memory and device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(
        tuple(shard.shard_sizes),
        dtype=properties.dtype,
        device=device,
        requires_grad=properties.requires_grad,
        pin_memory=pin,
    )


def metadata_by(
    spec: ShardingSpec, size: Sequence[int], properties: TensorProperties
) -> ShardedTensorMetadata:
    """The metadata that ``spec`` gives for this size; checked if a user defined the class."""
    metadata = check_spec(spec).build_metadata(torch.Size(size), properties)
    if type(spec) not in (ChunkShardingSpec, EnumerableShardingSpec):
        check_metadata(metadata)
    return metadata


def check_metadata(metadata: ShardedTensorMetadata) -> None:
    """Raise if the shards do not cover the tensor exactly, or cannot have the layout or format."""
    if not metadata.shards_metadata:
        raise ValueError("shards_metadata must not be empty: list all shards of the tensor")
    check_formats(metadata.tensor_properties.layout, metadata.tensor_properties.memory_format)
    check_boxes(tuple(metadata.size), [shard.box for shard in metadata.shards_metadata])


def given_or_inferred_spec(
    metadata: ShardedTensorMetadata, spec: ShardingSpec | None
) -> ShardingSpec:
    """``spec``, or for None a spec of these shards; raise if ``spec`` gives other shards."""
    shards = metadata.shards_metadata
    if spec is None:
        return infer_sharding_spec_from_shards_metadata(shards)
    expected = metadata_by(spec, metadata.size, metadata.tensor_properties).shards_metadata
    if set(expected) != set(shards):
        odd = next(iter(set(expected) ^ set(shards)))
        raise ValueError(
            f"sharding_spec does not cut the tensor as sharded_tensor_metadata says: only one of "
            f"the two has the shard {odd}; leave sharding_spec out, or pass the metadata's spec"
        )
    return spec


def own_shards(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, places: Sequence[Place]
) -> list[Shard]:
    """``local_shards`` in the order of ``metadata``; raise if it lists others for this rank."""
    rank = get_rank()
    own = [
        s for s, (owner, _) in zip(metadata.shards_metadata, places, strict=True) if owner == rank
    ]
    if len(local_shards) != len(own):
        raise ValueError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({len(own)}) on rank ({rank})"
        )
    by_box: dict[Box, list[Shard]] = {}
    for shard in local_shards:
        check_format_of(shard)
        check_properties(shard, metadata.tensor_properties, rank)
        by_box.setdefault(shard.metadata.box, []).append(shard)
    ordered = []
    for wanted in own:
        if not by_box.get(wanted.box):
            raise ValueError(
                f"rank {rank} was given shards at {[str(box) for box in by_box]}, but "
                f"sharded_tensor_metadata gives rank {rank} a shard at {wanted.box}"
            )
        ordered.append(by_box[wanted.box].pop(0))
    return ordered


def check_format_of(shard: Shard) -> None:
    """Raise ValueError unless the tensor of ``shard`` is strided and contiguous."""
    # Checked before contiguity, which a sparse tensor does not have.
    check_formats(shard.tensor.layout, torch.contiguous_format)
    if not shard.tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported for sharded "
            f"tensors: the shard at {shard.metadata.box} has strides {shard.tensor.stride()}"
        )


def check_properties(shard: Shard, properties: TensorProperties, rank: int) -> None:
    """Raise ValueError if the tensor of ``shard`` differs from ``properties`` of the metadata."""
    actual = named(TensorProperties.create_from_tensor(shard.tensor))
    for name, expected in named(properties).items():
        # Without an accelerator nothing is pinned, even on request.
        if actual[name] != expected and not (name == "pin_memory" and expected):
            raise ValueError(
                f"Local shards' tensor {name} property is incompatible with tensor property on "
                f"rank {rank}: sharded_tensor_metadata has {name}={expected}, the shard at "
                f"{shard.metadata.box} has {name}={actual[name]}"
            )


def named(properties: TensorProperties) -> dict[str, Any]:
    """The dtype, requires_grad and pin_memory by name, as plain data that ranks can compare."""
    return {
        "dtype": str(properties.dtype),
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
    }


# -- between ranks -----------------------------------------------------------------------------


def make_equal(
    make: Callable[[], T], describe: Callable[[T], str], what: str, group: AnyGroup
) -> T:
    """The result of ``make()``, if ``describe`` gives one text of it on all ranks. Collective."""
    results: list[T] = []

    def facts() -> dict[str, str]:
        results.append(make())
        return {what: describe(results[0])}

    agree_equal(facts, group)
    return results[0]


def describe(metadata: ShardedTensorMetadata) -> str:
    """A line of text on ``metadata``, for ranks to compare: equal only for equal metadata."""
    shards = metadata.shards_metadata
    boxes = [s.shard_offsets for s in shards], [s.shard_sizes for s in shards]
    contents = metadata.tensor_properties, boxes, [s.placement for s in shards]
    digest = blake2b(repr(contents).encode(), digest_size=8).hexdigest()
    first = f", the first {shards[0].box} on {shards[0].placement}" if shards else ""
    return (
        f"size {tuple(metadata.size)}, {metadata.tensor_properties.dtype}, {len(shards)} shards"
        f"{first} (digest {digest})"
    )


def unsupported(func: Callable[..., Any], args: Any, kwargs: Any, hint: str = "") -> RuntimeError:
    """The error for a call of ``func``, which cannot run on sharded tensors."""
    name, of = getattr(func, "__name__", str(func)), ""
    if name in ("__get__", "__set__", "__delete__"):
        of = f" of {getattr(getattr(func, '__self__', None), '__name__', 'a property')!r}"
    hint = hint or "use the local shards, or full_tensor() for a plain tensor"
    return RuntimeError(
        f"{name}{of} cannot run on a ShardedTensor: {hint}. It was: torch function '{name}'{of}, "
        f"with args: {_brief(args)} and kwargs: {_brief(kwargs)} not supported for ShardedTensor!"
    )


class _Word(str):
    """A str whose repr() has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def _brief(arguments: Any) -> Any:
    def abbreviated(leaf: Any) -> Any:
        if type(leaf) not in (Tensor, torch.nn.Parameter):
            return leaf
        return _Word(f"tensor({str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)})")

    return pytree.tree_map(abbreviated, arguments)
