"""ShardedTensor: each rank holds some shards of one tensor, and knows where the others are."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilework import rpc
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import AnyGroup, NonMember, get_default_group, get_rank, resolve
from tilework.layout import Tiling
from tilework.sharded import checks, loading, moves, remote
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.device import RemoteDevice
from tilework.sharded.metadata import (
    Items,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    _named_properties,
    tiling_of,
)
from tilework.sharded.placement import parse_and_validate_remote_device
from tilework.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
)


class ShardedTensor(ShardedTensorBase):
    """A tensor in shards on the ranks of a process group.

    Making one is collective in the sense that every rank must make it, with the same arguments;
    nothing is communicated but for ``init_rrefs``. Ranks outside ``process_group`` may make it
    too: they hold no shards.

    Args:
        sharding_spec: How the tensor is cut, and who gets which shard.
        size: Its shape, as numbers or one sequence.
        dtype: torch's default dtype if None.
        layout: Only torch.strided.
        requires_grad: Whether autograd records what is done with the shards.
        pin_memory: Whether the shards are to be in pinned memory, where an accelerator can
            make use of that.
        memory_format: Only torch.contiguous_format.
        process_group: Whose ranks hold the shards; the default group if None. Placements name
            global ranks.
        init_rrefs: Whether to make RRefs to all shards for :meth:`remote_shards`; collective
            over all workers, and needs :func:`tilework.rpc.init_rpc`.

    Raises:
        ValueError: The spec does not fit the size or the group, or an unsupported layout.
        RuntimeError: RPC is needed, and not initialized.

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, ShardedTensor
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     return ShardedTensor(spec, 5, 4).local_tensor().shape
        >>> run_ranks(2, program)
        [torch.Size([3, 4]), torch.Size([2, 4])]
    """

    _process_group: ProcessGroup | NonMember
    _owners: tuple[int, ...]
    _known_tiling: Tiling | None
    _init_rrefs: bool
    _remote: remote.RemoteShards | None

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(
                f"Expecting ShardingSpec but got: {type(sharding_spec).__name__}; "
                f"make a ChunkShardingSpec or an EnumerableShardingSpec"
            )
        checks.check_formats(layout, memory_format)
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        metadata = sharding_spec.build_metadata(checks.flat_size(size), properties)
        return cls._make(sharding_spec, metadata, None, process_group, init_rrefs)

    # A class with __new__ alone would pass its arguments on to Tensor.__init__.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def _make(
        cls,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        shards: Iterable[Shard] | None,
        group: AnyGroup,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """One on ``group``; ``shards`` None: with new, unset memory for this rank's."""
        group = get_default_group() if group is None else group
        if init_rrefs:
            remote.check_ready()
        placed = [
            parse_and_validate_remote_device(group, shard.placement)
            for shard in metadata.shards_metadata
        ]
        if shards is None:
            mine, properties = get_rank(), metadata.tensor_properties
            shards = [
                Shard(checks.empty_shard(shard, device, properties), shard)
                for shard, (owner, device) in zip(metadata.shards_metadata, placed, strict=True)
                if owner == mine
            ]
        self = cls._from_metadata(spec, metadata, shards)
        self._process_group = group
        self._owners = tuple(owner for owner, _ in placed)
        self._known_tiling = None
        self._init_rrefs = init_rrefs
        self._remote = None
        if init_rrefs:
            self._remote = remote.share(self)
        return self

    @classmethod
    def init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: int | Sequence[int],
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of the shards that each rank has.

        Collective over the group; blocks. What is wrong on one rank raises on all.

        Args:
            local_shards: This rank's, which are used as they are; may be empty on some ranks.
            global_size: The whole tensor's shape, the same on every rank.
            process_group: The group; the default group if None.
            init_rrefs: See :class:`ShardedTensor`.

        Raises:
            ValueError: Shards do not fit this rank, each other, the size, or those of other ranks.
        """
        size = checks.flat_size(global_size)
        metadata = checks.gather_metadata(local_shards, size, process_group)
        spec = infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._make(spec, metadata, local_shards, process_group, init_rrefs)

    @classmethod
    def init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of the one shard that each rank has, cut as ``sharding_spec`` says.

        Collective over the group; blocks. What is wrong on one rank raises on all.

        Args:
            local_tensor: This rank's shard, contiguous; it is used as it is.
            sharding_spec: Gives each rank of the group exactly one shard.
            global_size: The whole tensor's shape, the same on every rank.
            process_group: The group; the default group if None.
            init_rrefs: See :class:`ShardedTensor`.

        Raises:
            ValueError: The spec does not fit, or the tensor is not the shard that it names.
        """
        size = checks.flat_size(global_size)
        shard = checks.gather_one_shard(local_tensor, sharding_spec, size, process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = sharding_spec.build_metadata(size, properties)
        return cls._make(sharding_spec, metadata, [shard], process_group, init_rrefs)

    @classmethod
    def from_local_shards_and_global_metadata(  # type: ignore[override]
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of shards and metadata that every rank has already.

        Nothing is communicated (but for ``init_rrefs``); that the metadata is the same on all
        ranks is the caller's word.

        Raises:
            ValueError: The metadata does not fit itself or the group, or this rank's shards are
                not those that it names.
        """
        metadata = sharded_tensor_metadata
        checks.check_metadata(metadata)
        shards = checks.own_shards(local_shards, metadata, process_group)
        spec = sharding_spec or infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        return cls._make(spec, metadata, shards, process_group, init_rrefs)

    @property
    def process_group(self) -> ProcessGroup | NonMember:
        """Whose ranks hold the shards."""
        return self._process_group

    def _group(self) -> ProcessGroup | NonMember:
        return self._process_group

    @property
    def tiling(self) -> Tiling:
        if self._known_tiling is None:
            self._known_tiling = tiling_of(self._metadata, self._owners)
        return self._known_tiling

    def like(self, tensors: Iterable[Tensor], **properties: Any) -> ShardedTensor:
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

    def _again(self, shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
        """Cut and placed as this one; nothing needs to be checked again."""
        made = type(self)._from_metadata(self._sharding_spec, metadata, shards)
        made._process_group, made._owners = self._process_group, self._owners
        made._known_tiling = self._known_tiling
        made._init_rrefs, made._remote = False, None
        return made

    def _on(
        self,
        tiles: Iterable[Tensor],
        dtype: torch.dtype,
        device: torch.device | None,
        group: AnyGroup,
    ) -> ShardedTensor:
        """Cut as this one; each shard with its rank, on ``device``, and on another group."""
        properties = replace(self._metadata.tensor_properties, dtype=dtype)
        metadata, spec = replace(self._metadata, tensor_properties=properties), self._sharding_spec
        if device is not None:
            metadata, spec = metadata.moved(device), spec.moved(device)
        mine = zip(self._local_shards, tiles, strict=True)
        made = self._again([shard.with_tensor(tile) for shard, tile in mine], metadata)
        made._sharding_spec = spec
        if group is not None:
            made._process_group = resolve(group)
        return made

    def _set_properties(self, **properties: Any) -> None:
        changed = replace(self._metadata.tensor_properties, **properties)
        self._metadata = replace(self._metadata, tensor_properties=changed)

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Collect the whole tensor on one rank.

        Collective over the group; blocks. Ranks outside it do nothing.

        Args:
            dst: The global rank that gets it.
            out: On ``dst``, a tensor of this one's shape, which is written; None on the others.
            enforce_dtype: Send shards in ``out``'s dtype, so that ``dst`` needs no room to convert.
            dtype: Send shards in this dtype.

        Raises:
            ValueError: ``out`` is missing on ``dst``, has another shape or is given elsewhere, or
                ``dst`` is not in the group. Raised on every rank.
        """
        moves.gather(self, dst, out, enforce_dtype, dtype)

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one, on every rank of the group.

        Collective over the group; blocks. Differentiable: the result is one value that all ranks
        hold, so each shard's gradient is its part of the result's.
        """
        return moves.full_tensor(self)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut this tensor anew, in place; return it.

        Collective over the group; blocks. Each rank receives only what it lacks. Takes memory for
        the new shards and one bounded buffer.

        Args:
            resharding_spec: Any spec whose placements are on ranks of the group.

        Raises:
            ValueError: It is no spec, or does not fit the tensor or the group; the tensor stays
                as it was.
        """
        spec, metadata, owners, shards = moves.reshard(self, resharding_spec)
        self._sharding_spec, self._metadata = spec, metadata
        self._owners, self._local_shards, self._known_tiling = owners, shards, None
        return self

    def remote_shards(self) -> dict[int, list[rpc.RRef[Shard]]]:
        """RRefs to the other ranks' shards, by global rank; ranks without shards are left out.

        Raises:
            RuntimeError: The tensor was made with ``init_rrefs=False``.
        """
        if self._remote is None:
            raise RuntimeError(
                "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available: "
                "make it with init_rrefs=True, after tilework.rpc.init_rpc"
            )
        return self._remote.rrefs

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """This tensor in another dtype or on other devices; itself if that changes nothing.

        Local; not collective, but to be called alike on every rank, since the metadata changes.

        Args:
            args: As those of torch.Tensor.to. A device without an index, such as ``"cpu"``, or
                this rank's own: each rank's shards stay with it.
            kwargs: Likewise, and ``process_group``: the group of the result, where the present
                one does not serve the new device.

        Raises:
            RuntimeError: A memory format other than contiguous or preserved.
        """
        return moves.to(self, *args, **kwargs)

    def cpu(  # type: ignore[override]
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: AnyGroup = None,
    ) -> ShardedTensor:
        """This tensor in CPU memory; itself if it is there. See :meth:`to`."""
        return moves.to(self, "cpu", memory_format=memory_format, process_group=process_group)

    def cuda(  # type: ignore[override]
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: AnyGroup = None,
    ) -> ShardedTensor:
        """This tensor on each rank's current CUDA device, always as a new object. See :meth:`to`.

        Shards that are there already are shared, not copied.

        Raises:
            ValueError: ``device`` is not this rank's current CUDA device.
        """
        return moves.cuda(self, device, non_blocking, memory_format, process_group)

    def __copy__(self) -> ShardedTensor:
        return self._again(list(self._local_shards), self._metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            shards = [Shard(copy.deepcopy(s.tensor, memo), s.metadata) for s in self._local_shards]
            memo[id(self)] = self._again(shards, self._metadata)
        found: ShardedTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Nothing but plain values and the local tensors: torch.load takes it with weights_only.
        shards = [(shard.tensor, shard.metadata) for shard in self._local_shards]
        seat = loading.seat(self._process_group)
        return _rebuild, (shards, self._metadata, seat, self._sharding_spec, self._init_rrefs)


def _rebuild(
    shards: list[tuple[Tensor, ShardMetadata]],
    metadata: ShardedTensorMetadata,
    seat: loading.Seat,
    spec: ShardingSpec,
    init_rrefs: bool,
) -> ShardedTensor:
    """The tensor that was saved, on the current group."""
    group = loading.find_seat(seat)
    local = [Shard(tensor, shard) for tensor, shard in shards]
    return ShardedTensor._make(spec, metadata, local, group, init_rrefs)


# What torch.load accepts with weights_only=True, besides tensors and containers.
torch.serialization.add_safe_globals(
    [
        _rebuild,
        _named_properties,
        Items,
        RemoteDevice,
        ShardMetadata,
        ShardedTensorMetadata,
        ChunkShardingSpec,
        EnumerableShardingSpec,
    ]
)
