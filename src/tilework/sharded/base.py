"""ShardedTensorBase: some shards of one tensor, and the metadata of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.layout import Tiling
from tilework.sharded import checks
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, tiling_of
from tilework.sharded.registry import find_handler
from tilework.sharded.showing import as_text, one_line
from tilework.sharded.specs import ShardingSpec, infer_sharding_spec_from_shards_metadata
from tilework.sharded.tiled import TiledTensor

BaseT = TypeVar("BaseT", bound="ShardedTensorBase")


class ShardedTensorBase(TiledTensor):
    """Shards, and the metadata of the whole tensor. Knows no group, so it never communicates."""

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    @classmethod
    def _from_metadata(
        cls: type[BaseT],
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        shards: Iterable[Shard],
    ) -> BaseT:
        """Make one of what is known to fit together."""
        properties, shards = metadata.tensor_properties, list(shards)
        device = shards[0].tensor.device if shards else _common_device(metadata)
        self = cls._wrap(metadata.size, properties.dtype, device, properties.requires_grad)
        self._sharding_spec = spec
        self._metadata = metadata
        self._local_shards = shards
        return self

    @classmethod
    def from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """A tensor of shards that are all known already, without any process group.

        Local; not collective. The metadata is checked in itself; that it is the same on all
        ranks is the caller's word.

        Args:
            local_shards: Those that are here; may be all of them.
            sharded_tensor_metadata: The whole tensor.
            sharding_spec: How it is cut; inferred from the metadata if None.

        Raises:
            ValueError: There are no shards, they overlap or leave a gap, or the layout is not
                strided.
        """
        metadata = sharded_tensor_metadata
        checks.check_metadata(metadata)
        spec = sharding_spec or infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._from_metadata(spec, metadata, local_shards)

    def metadata(self) -> ShardedTensorMetadata:
        """The whole tensor's shards, size and properties; the same on every rank."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """How the tensor is cut."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """This rank's shards; empty if it holds none."""
        return self._local_shards

    def local_tensor(self) -> Tensor:
        """The one shard of this rank.

        Raises:
            NotImplementedError: It holds none or several: see :meth:`local_shards`.
        """
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. This rank has {len(self._local_shards)}: "
                f"use local_shards()"
            )
        return self._local_shards[0].tensor

    def local_tiles(self) -> list[Tensor]:
        return [shard.tensor for shard in self._local_shards]

    @property
    def tiling(self) -> Tiling:
        places = [shard.placement for shard in self._metadata.shards_metadata]
        owners = tuple(-1 if place is None else place.rank() or 0 for place in places)
        return tiling_of(self._metadata, owners)

    def is_pinned(self) -> bool:  # type: ignore[override]
        """Whether the shards were asked to be in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    def _group(self) -> Any:
        """What handlers are given as the process group."""
        return None

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return as_text(self)

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = _first_sharded(args, kwargs)
        handler = None if first is None else find_handler(func, first._sharding_spec)
        if first is None or handler is None:
            raise checks.unsupported(func, args, kwargs)
        return handler(types, args, kwargs, first._group())


def _common_device(metadata: ShardedTensorMetadata) -> torch.device:
    """The kind of device of all shards; the CPU where they differ."""
    places = [shard.placement for shard in metadata.shards_metadata]
    kinds = {place.device().type for place in places if place is not None}
    return torch.device(kinds.pop() if len(kinds) == 1 else "cpu")


def _first_sharded(args: Any, kwargs: Any) -> ShardedTensorBase | None:
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, ShardedTensorBase)), None)
