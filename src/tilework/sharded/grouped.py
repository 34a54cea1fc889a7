"""GroupedTensor: shards on the ranks of a group, and new tensors made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import AnyGroup, NonMember, resolve
from tilework.layout import Tiling
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.graph import keep_stand_in
from tilework.sharded.metadata import Geometry, Shard, ShardedTensorMetadata
from tilework.sharded.placement import Place
from tilework.sharded.specs import ShardingSpec

GroupedT = TypeVar("GroupedT", bound="GroupedTensor")


class GroupedTensor(ShardedTensorBase):
    """Shards that each belong to a rank of a group. What is here does not communicate."""

    _process_group: ProcessGroup | NonMember
    _geometry: Geometry

    @classmethod
    def _assembled(
        cls: type[GroupedT],
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        placed: Sequence[Place],
        shards: Iterable[Shard],
        group: AnyGroup,
    ) -> GroupedT:
        """One of what is known to fit together."""
        self = cls._from_metadata(spec, metadata, shards)
        self._process_group = resolve(group)
        self._geometry = Geometry(metadata, [owner for owner, _ in placed])
        return self

    @property
    def process_group(self) -> ProcessGroup | NonMember:
        """Whose ranks hold the shards."""
        return self._process_group

    def _group(self) -> ProcessGroup | NonMember:
        return self._process_group

    @property
    def owners(self) -> tuple[int, ...]:
        """The global rank of each of the metadata's shards."""
        return self._geometry.owners

    @property
    def tiling(self) -> Tiling:
        return self._geometry.tiling

    def _inherit(self, other: ShardedTensorBase) -> None:
        assert isinstance(other, GroupedTensor)
        self._process_group, self._geometry = other._process_group, other._geometry

    def relaid(
        self: GroupedT,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        geometry: Geometry,
        shards: list[Shard],
    ) -> GroupedT:
        """Another tensor on this one's group, of what the caller knows to fit together. Local."""
        made = self._again(shards, metadata)
        made._sharding_spec, made._geometry = spec, geometry
        return made

    def of_results(
        self: GroupedT,
        results: Sequence[Tensor],
        device: torch.device | None = None,
        group: AnyGroup = None,
    ) -> GroupedT:
        """Another tensor cut as this one, of what came of its graph_tiles. Local.

        Args:
            results: Of the same sizes; all of one dtype, and all or none in the graph.
            device: The kind on which all ranks' shards are now, without an index; None: as before.
            group: The group; None for this one's.
        """
        metadata, spec, first = self._metadata, self._sharding_spec, results[0]
        properties = replace(
            metadata.tensor_properties, dtype=first.dtype, requires_grad=first.requires_grad
        )
        metadata = replace(metadata, tensor_properties=properties)
        mine = [shard.metadata for shard in self._local_shards]
        if device is not None:
            metadata, spec = metadata.moved(device), spec.moved(device)
            mine = [shard.moved(device) for shard in mine]
        made = self._again([Shard(*pair) for pair in zip(results, mine, strict=False)], metadata)
        made._sharding_spec = spec
        if not mine:
            keep_stand_in(made, first)
        if group is not None:
            made._process_group = resolve(group)
        return made
