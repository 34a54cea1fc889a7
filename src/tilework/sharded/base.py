"""ShardedTensorBase: some shards of one tensor, and the metadata of all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.layout import Tiling
from tilework.sharded import checks
from tilework.sharded.formatting import as_text, one_line
from tilework.sharded.metadata import Geometry, Shard, ShardedTensorMetadata, ShardMetadata
from tilework.sharded.registry import find_handler
from tilework.sharded.specs import ShardingSpec
from tilework.tiled.tensor import TiledTensor

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
            ValueError: There are no shards, they overlap or leave a gap, the spec cuts otherwise,
                or the layout is not strided.
        """
        metadata = sharded_tensor_metadata
        checks.check_metadata(metadata)
        checks.check_listed(local_shards, metadata)
        spec = checks.spec_of(metadata, sharding_spec)
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
        ranks = [None if place is None else place.rank() for place in places]
        owners = [-1 if rank is None else rank for rank in ranks]
        return Geometry(self._metadata, owners).tiling

    def like(self: BaseT, tensors: Iterable[Tensor], **properties: Any) -> BaseT:
        """A tensor cut as this one, of other local tensors. Local; not collective.

        Args:
            tensors: One for each of :meth:`local_shards`, of the same size; any dtype or device.
            properties: Fields of :class:`TensorProperties` that differ from this tensor's.

        Example:
            >>> from tilework.sharded import ChunkShardingSpec, ones
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     st = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
            ...     return st.like([st.local_tensor() * 3]).full_tensor().tolist()
            >>> run_ranks(2, program)[0]
            [3.0, 3.0, 3.0, 3.0]
        """
        shards = [
            shard.with_tensor(tensor)
            for shard, tensor in zip(self._local_shards, tensors, strict=True)
        ]
        metadata = self._metadata
        changed = replace(metadata.tensor_properties, **properties)
        return self._again(shards, replace(metadata, tensor_properties=changed))

    def _again(self: BaseT, shards: list[Shard], metadata: ShardedTensorMetadata) -> BaseT:
        """Cut and placed as this one; nothing needs to be checked again."""
        made = type(self)._from_metadata(self._sharding_spec, metadata, shards)
        made._inherit(self)
        return made

    def _inherit(self, other: ShardedTensorBase) -> None:
        """Take over what tensors that are cut and placed alike have in common."""

    def _set_properties(self, **properties: Any) -> None:
        changed = replace(self._metadata.tensor_properties, **properties)
        self._metadata = replace(self._metadata, tensor_properties=changed)

    def is_pinned(self) -> bool:  # type: ignore[override]
        """Whether the shards were asked to be in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    def _group(self) -> Any:
        """What handlers are given as the process group."""
        return None

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return one_line(self)

    def __str__(self) -> str:
        return as_text(self)

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

    def __copy__(self: BaseT) -> BaseT:
        made = self._again(list(self._local_shards), self._metadata)
        mark_parameter(made, _is_parameter(self))
        return made

    def __deepcopy__(self: BaseT, memo: dict[int, Any]) -> BaseT:
        if id(self) not in memo:
            shards = [Shard(copy.deepcopy(s.tensor, memo), s.metadata) for s in self._local_shards]
            made = memo[id(self)] = self._again(shards, self._metadata)
            mark_parameter(made, _is_parameter(self))
        found: BaseT = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        shards = [(shard.tensor, shard.metadata) for shard in self._local_shards]
        return rebuild_base, (shards, self._metadata, self._sharding_spec, _is_parameter(self))

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


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def mark_parameter(tensor: Tensor, is_parameter: bool) -> None:
    """Have torch.nn take ``tensor`` for a Parameter, or not."""
    if is_parameter:
        tensor._is_param = True


def rebuild_base(
    shards: list[tuple[Tensor, ShardMetadata]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    is_parameter: bool,
) -> ShardedTensorBase:
    """The tensor that was saved."""
    checks.check_metadata(metadata)
    local = [Shard(tensor, shard) for tensor, shard in shards]
    made = ShardedTensorBase._from_metadata(spec, metadata, local)
    mark_parameter(made, is_parameter)
    return made


def _common_device(metadata: ShardedTensorMetadata) -> torch.device:
    """The kind of device of all shards; the CPU where they differ."""
    places = [shard.placement for shard in metadata.shards_metadata]
    kinds = {place.device().type for place in places if place is not None}
    return torch.device(kinds.pop() if len(kinds) == 1 else "cpu")


def _first_sharded(args: Any, kwargs: Any) -> ShardedTensorBase | None:
    if args and isinstance(args[0], ShardedTensorBase):
        return args[0]
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, ShardedTensorBase)), None)
