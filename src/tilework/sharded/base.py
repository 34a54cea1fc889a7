"""ShardedTensorBase: some shards of one tensor, and the metadata of all; and tensors made of tiles.

A rank without tiles has a stand-in: an empty tile with the tensor's dtype and a place in the graph.
Thus each rank gets the same dtype, the same ``requires_grad`` and the same errors, and takes part
in all communication, forward and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import AnyGroup, NonMember, resolve
from tilework.layout import Box, Tiling
from tilework.sharded import checks
from tilework.sharded.checks import Place
from tilework.sharded.formatting import Overview, headline, overview, overview_page
from tilework.sharded.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMap,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.registry import find_handler
from tilework.sharded.specs import ShardingSpec
from tilework.tiled import TiledTensor, torch_arguments

BaseT = TypeVar("BaseT", bound="ShardedTensorBase")


class ShardedTensorBase(TiledTensor):
    """Some shards of a tensor and the metadata of all shards, without a process group.

    Base class of ShardedTensor, which has a group and communicates.
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _shard_map: ShardMap
    _local_shards: list[Shard]
    #: None only in this class; the group that handlers of operators get.
    _process_group: ProcessGroup | NonMember | None = None

    @classmethod
    def _assemble(
        cls: type[BaseT],
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        shards: list[Shard],
        shard_map: ShardMap,
        group: ProcessGroup | NonMember | None,
    ) -> BaseT:
        """A new tensor of these parts, unchecked: the caller knows that they fit together."""
        properties = metadata.tensor_properties
        device = shards[0].tensor.device if shards else _common_device(metadata)
        self = cls._wrap(metadata.size, properties.dtype, device, properties.requires_grad)
        self._sharding_spec = spec
        self._metadata = metadata
        self._shard_map = shard_map
        self._local_shards = shards
        self._process_group = group
        return self

    @classmethod
    def from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """A tensor of local shards and the metadata of all shards, without any process group.

        Local; not collective. The metadata is checked for consistency. The caller ensures that the
        metadata is the same on all ranks.

        Args:
            local_shards: This rank's shards; may be all shards.
            sharding_spec: The spec that gives these shards; inferred from the metadata if None.

        Raises:
            ValueError: There are no shards, they overlap or leave a gap, the spec gives other
                shards, or the layout is not strided.
        """
        metadata = sharded_tensor_metadata
        checks.check_metadata(metadata)
        listed = {shard.box for shard in metadata.shards_metadata}
        for box in (shard.metadata.box for shard in local_shards):
            if box not in listed:
                raise ValueError(
                    f"sharded_tensor_metadata lists no shard at {box}, where a local shard is"
                )
        spec = checks.given_or_inferred_spec(metadata, sharding_spec)
        return cls._assemble(spec, metadata, list(local_shards), _map_by_placements(metadata), None)

    #: torch's name.
    _init_from_local_shards_and_global_metadata: Any = from_local_shards_and_global_metadata

    def metadata(self) -> ShardedTensorMetadata:
        """The size, the properties and all shards of the full tensor; the same on every rank."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """The spec that gives the shards."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """This rank's shards; empty if the rank holds none."""
        return self._local_shards

    def local_tensor(self) -> Tensor:
        """This rank's only shard.

        Raises:
            NotImplementedError: The rank holds none or several: see :meth:`local_shards`.
        """
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. This rank has {len(self._local_shards)}: "
                f"use local_shards()"
            )
        return self._local_shards[0].tensor

    def local_tiles(self) -> list[Tensor]:
        return [shard.tensor for shard in self._local_shards]

    def local_boxes(self) -> list[Box]:
        return [shard.metadata.box for shard in self._local_shards]

    @property
    def tiling(self) -> Tiling:
        return self._shard_map.tiling

    def like(self: BaseT, tensors: Iterable[Tensor], **properties: Any) -> BaseT:
        """A new tensor with this tensor's sharding and other local tensors. Local; not collective.

        Args:
            tensors: A tensor for each of :meth:`local_shards`, of the same size; any dtype or
                device.
            properties: Fields of :class:`TensorProperties` that differ from this tensor's.
        """
        shards = [
            shard.with_tensor(tensor)
            for shard, tensor in zip(self._local_shards, tensors, strict=True)
        ]
        metadata = self._metadata
        changed = replace(metadata.tensor_properties, **properties)
        return self._sharded_alike(shards, replace(metadata, tensor_properties=changed))

    def _sharded_alike(self: BaseT, shards: list[Shard], metadata: ShardedTensorMetadata) -> BaseT:
        """A tensor of ``shards`` with this tensor's spec, owners and group; unchecked."""
        return self._assemble(
            self._sharding_spec, metadata, shards, self._shard_map, self._process_group
        )

    def _set_properties(self, **properties: Any) -> None:
        changed = replace(self._metadata.tensor_properties, **properties)
        self._metadata = replace(self._metadata, tensor_properties=changed)

    def is_pinned(self) -> bool:  # type: ignore[override]
        """True if pinned memory was asked for."""
        return self._metadata.tensor_properties.pin_memory

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        view = overview(self._metadata, self._sharding_spec)
        return f"{type(self).__name__}({headline(view)})"

    def __str__(self) -> str:
        return str(overview_page(self._overview()))

    def _repr_html_(self) -> str:
        return overview_page(self._overview()).html()

    def _overview(self) -> Overview:
        group, name = self._process_group, f"{type(self).__name__} "
        idle = () if group is None else {*group.global_ranks} - {*self.tiling.ranks}
        return overview(self._metadata, self._sharding_spec, name, idle)

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

    def __copy__(self: BaseT) -> BaseT:
        copied = self._sharded_alike(list(self._local_shards), self._metadata)
        mark_parameter(copied, _is_parameter(self))
        return copied

    def __deepcopy__(self: BaseT, memo: dict[int, Any]) -> BaseT:
        if id(self) not in memo:
            shards = [Shard(copy.deepcopy(s.tensor, memo), s.metadata) for s in self._local_shards]
            memo[id(self)] = self._sharded_alike(shards, self._metadata)
            mark_parameter(memo[id(self)], _is_parameter(self))
        copied: BaseT = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        shards = [(shard.tensor, shard.metadata) for shard in self._local_shards]
        return rebuild_base, (shards, self._metadata, self._sharding_spec, _is_parameter(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch_arguments(func, args, kwargs) if kwargs else (args, {})
        first = _first_sharded(args, kwargs)
        handler = None if first is None else find_handler(func, first._sharding_spec)
        if first is None or handler is None:
            raise checks.unsupported(func, args, kwargs)
        return handler(types, args, kwargs, first._process_group)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def mark_parameter(tensor: Tensor, is_parameter: bool) -> None:
    """Make torch.nn treat ``tensor`` as a Parameter if ``is_parameter``; else do nothing."""
    if is_parameter:
        tensor._is_param = True


def rebuild_base(
    shards: list[tuple[Tensor, ShardMetadata]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    is_parameter: bool,
) -> ShardedTensorBase:
    """The tensor that was pickled as these parts; pickle calls this to load a tensor."""
    checks.check_metadata(metadata)
    local = [Shard(tensor, shard) for tensor, shard in shards]
    shard_map = _map_by_placements(metadata)
    tensor = ShardedTensorBase._assemble(spec, metadata, local, shard_map, None)
    mark_parameter(tensor, is_parameter)
    return tensor


def _map_by_placements(metadata: ShardedTensorMetadata) -> ShardMap:
    """The rank that each shard's placement names; -1 if it names a worker or no owner."""
    places = [shard.placement for shard in metadata.shards_metadata]
    ranks = [None if place is None else place.rank() for place in places]
    return ShardMap(metadata, [-1 if rank is None else rank for rank in ranks])


def _common_device(metadata: ShardedTensorMetadata) -> torch.device:
    """The device, without index, that all placements name; the CPU if their types differ."""
    places = [shard.placement for shard in metadata.shards_metadata]
    kinds = {place.device().type for place in places if place is not None}
    return torch.device(kinds.pop() if len(kinds) == 1 else "cpu")


def _first_sharded(args: Any, kwargs: Any) -> ShardedTensorBase | None:
    if args and isinstance(args[0], ShardedTensorBase):
        return args[0]
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, ShardedTensorBase)), None)


# -- local tiles in the autograd graph ---------------------------------------------------------


def graph_tiles(tensor: ShardedTensorBase) -> list[Tensor]:
    """This rank's tiles; if it has none, a list of the stand-in, an empty tile in the graph."""
    return tensor.local_tiles() or [_stand_in(tensor)]


def _stand_in(tensor: ShardedTensorBase) -> Tensor:
    shards, stand_in = tensor.__dict__.get("_stand_in", (None, None))
    # A reshard or a change of dtype has given the tensor other shards.
    if shards is not tensor._local_shards:
        stand_in = torch.zeros(
            (0,) * tensor.dim(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        keep_stand_in(tensor, stand_in)
    assert isinstance(stand_in, Tensor)
    return stand_in


def keep_stand_in(tensor: ShardedTensorBase, stand_in: Tensor) -> None:
    """Store ``stand_in``, an empty tile that holds the tensor's place in the autograd graph."""
    tensor.__dict__["_stand_in"] = (tensor._local_shards, stand_in)


# -- new tensors of shards that are known to fit; local ----------------------------------------


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

    ``device`` is the type of device of all ranks' results, without an index; it and ``group`` are
    the operand's by default.
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
