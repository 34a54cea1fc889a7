"""Sharding specs: the shards of a tensor, and their owners. Values; they never communicate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilework.comm.world import AnyGroup
from tilework.layout import (
    check_boxes,
    check_disjoint,
    chunk_offsets,
    chunk_sizes,
    find_overlap,
    infer_chunking,
)
from tilework.sharded.metadata import (
    Items,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    covers,
    trusted_shard,
)

#: The number of sizes for which a spec caches the shards.
_CACHED_SIZES = 16


class ShardingSpec(ABC):
    """A rule that cuts tensors of any size into shards with owners. Equal specs, equal shards."""

    #: :func:`tilework.sharded.shard_tensor`, set by that module, which imports this one.
    _shard_tensor: ClassVar[Callable[..., Any]]

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The metadata, with all shards and owners, of a tensor of this size.

        Raises:
            ValueError: The spec does not fit a tensor of this size.
        """

    def moved(self, device: torch.device) -> ShardingSpec:
        """The spec of the same shards on ``device`` of their owners."""
        return _Moved(self, device)

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: AnyGroup = None) -> Any:
        """A ShardedTensor of ``src_rank``'s values. See :func:`tilework.sharded.shard_tensor`."""
        return self._shard_tensor(tensor, self, src_rank, process_group)


@dataclass(frozen=True, slots=True)
class _Moved(ShardingSpec):
    """A user-defined spec, with the shards on another device of the same owners."""

    spec: ShardingSpec
    device: torch.device

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return self.spec.build_metadata(tensor_sizes, tensor_properties).moved(self.device)


@dataclass(frozen=True, slots=True)
class ChunkShardingSpec(ShardingSpec):
    """Splits one dim into as many chunks as there are placements, as torch.chunk does.

    All chunks have the same size, except that the last may be smaller or empty.

    Args:
        dim: The dim; negative numbers count from the last.
        placements: The owners of the first chunk, the second, …; a rank may come several times.

    Raises:
        NotImplementedError: ``dim`` is a name.
        ValueError: ``dim`` is not an integer, or there is no placement.
        TypeError: ``placements`` is a string.
    """

    dim: int
    placements: Items[RemoteDevice]
    #: Cached shards, by dim and size, as models have many tensors of few sizes.
    _cached_shards: dict[tuple[int, torch.Size], Items[ShardMetadata]] = field(
        compare=False, repr=False
    )

    def __init__(self, dim: int, placements: Iterable[RemoteDevice | str | torch.device]) -> None:
        if isinstance(dim, str):
            raise NotImplementedError(
                f"ChunkShardingSpec does not support named dimension {dim!r}: give its number"
            )
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ValueError(f"Sharding dim needs to be an integer, found: {dim!r}")
        if isinstance(placements, str):
            raise TypeError(f"placements is a list, one for each chunk: write [{placements!r}]")
        places = Items(p if isinstance(p, RemoteDevice) else RemoteDevice(p) for p in placements)
        if not places:
            raise ValueError("placements must not be empty: give one for each chunk")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", places)
        object.__setattr__(self, "_cached_shards", {})

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        size = torch.Size(tensor_sizes)
        if min(size, default=0) < 0:
            raise ValueError(f"sizes must be 0 or more, got {tuple(size)}")
        dim = self.dim if self.dim >= 0 else self.dim + len(size)
        if not 0 <= dim < len(size):
            raise ValueError(f"Invalid sharding dim: {self.dim} for a tensor of size {tuple(size)}")
        shards = self._cached_shards.get((dim, size))
        if shards is None:
            if len(self._cached_shards) >= _CACHED_SIZES:
                self._cached_shards.clear()
            shards = self._cached_shards[dim, size] = Items(_chunks(size, dim, self.placements))
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def moved(self, device: torch.device) -> ChunkShardingSpec:
        kept = [
            place if covers(device, place.device()) else place.with_device(device)
            for place in self.placements
        ]
        return ChunkShardingSpec(self.dim, kept)

    def __reduce__(self) -> tuple[type[ChunkShardingSpec], tuple[object, ...]]:
        return ChunkShardingSpec, (self.dim, tuple(self.placements))


@dataclass(frozen=True, slots=True)
class EnumerableShardingSpec(ShardingSpec):
    """Splits a tensor into the listed shards: grids, uneven shards, any boxes.

    Args:
        shards: All shards, in the order in which a rank with several holds them.

    Raises:
        ValueError: There are none, they differ in number of dims, or two of them overlap.
    """

    shards: Items[ShardMetadata]

    def __init__(self, shards: Iterable[ShardMetadata]) -> None:
        items = Items(shards)
        if not items:
            raise ValueError("shards must not be empty: list all shards of the tensor")
        if len({len(shard.shard_sizes) for shard in items}) > 1:
            dims = [len(shard.shard_sizes) for shard in items]
            raise ValueError(f"Found inconsistent numbers of dims for shards: {dims}")
        validate_non_overlapping_shards_metadata(items)
        object.__setattr__(self, "shards", items)

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        check_boxes(tuple(tensor_sizes), [shard.box for shard in self.shards])
        return ShardedTensorMetadata(self.shards, torch.Size(tensor_sizes), tensor_properties)

    def moved(self, device: torch.device) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(shard.moved(device) for shard in self.shards)

    def __reduce__(self) -> tuple[type[EnumerableShardingSpec], tuple[object, ...]]:
        return EnumerableShardingSpec, (tuple(self.shards),)


def infer_sharding_spec_from_shards_metadata(
    shards_metadata: Sequence[ShardMetadata],
) -> ShardingSpec:
    """The spec of these shards.

    Returns:
        A ChunkShardingSpec where the shards are chunks along one dim, in any order, each with a
        placement; else an EnumerableShardingSpec.

    Raises:
        ValueError: There are no shards, or two overlap.

    Example: ``infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)``.
    """
    if not shards_metadata:
        raise ValueError("shards_metadata must not be empty: list all shards of the tensor")
    places = [shard.placement for shard in shards_metadata]
    if None not in places:
        shards = sorted(shards_metadata, key=lambda shard: tuple(shard.shard_offsets))
        boxes = [shard.box for shard in shards]
        shape = tuple(map(max, zip(*(_ends(shard) for shard in shards), strict=True)))
        dim = infer_chunking(shape, boxes)
        if dim is not None:
            return ChunkShardingSpec(dim, [s.placement for s in shards if s.placement is not None])
    return EnumerableShardingSpec(shards_metadata)


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Check that no two shards share an element.

    Takes n log n time for n shards.

    Raises:
        ValueError: Two shards overlap; the error names them.

    Example: ``validate_non_overlapping_shards_metadata(spec.shards)``.
    """
    offsets, sizes = [s.shard_offsets for s in shards], [s.shard_sizes for s in shards]
    if find_overlap(offsets, sizes) is not None:
        check_disjoint([shard.box for shard in shards])


def _chunks(
    size: tuple[int, ...], dim: int, placements: Sequence[RemoteDevice]
) -> Iterator[ShardMetadata]:
    n, before, after = len(placements), (0,) * dim, (0,) * (len(size) - dim - 1)
    lengths = chunk_sizes(size[dim], n)
    sizes = {length: Items((*size[:dim], length, *size[dim + 1 :])) for length in {*lengths}}
    for offset, length, place in zip(chunk_offsets(size[dim], n), lengths, placements, strict=True):
        yield trusted_shard(Items((*before, offset, *after)), sizes[length], place)


def _ends(shard: ShardMetadata) -> tuple[int, ...]:
    """The shard's end along each dim; 0 along the dims in which it is empty."""
    return tuple(
        offset + size if size else 0
        for offset, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    )
