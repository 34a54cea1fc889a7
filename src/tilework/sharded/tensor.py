"""ShardedTensor: shards of one tensor on the ranks of a group, and the methods that move them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import leave_function
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    current_world,
    get_default_group,
    get_rank,
    get_world_size,
    is_initialized,
)
from tilework.sharded import checks, from_local_shards, moves
from tilework.sharded.base import (
    ShardedTensorBase,
    assemble,
    graph_tiles,
    keep_stand_in,
    mark_parameter,
    rebuild_base,
)
from tilework.sharded.checks import check_rrefs, places
from tilework.sharded.metadata import (
    Items,
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    _named_properties,
    covers,
)
from tilework.sharded.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec


class ShardedTensor(ShardedTensorBase):
    """A tensor in shards on the ranks of a process group.

    Every rank must make the tensor, with the same arguments. Nothing is communicated, except with
    ``init_rrefs``. Ranks outside ``process_group`` may make the tensor, too: they hold no shards.

    Args:
        size: The shape, as numbers or one sequence.
        dtype: torch's default dtype if None.
        layout: Only torch.strided.
        requires_grad: Whether autograd records operations on the shards.
        pin_memory: Whether the shards should be in pinned memory, if an accelerator can use that.
        memory_format: Only torch.contiguous_format.
        process_group: The group whose ranks hold the shards; the default group if None.
            Placements name global ranks.
        init_rrefs: Whether to make RRefs to all shards for :meth:`remote_shards`; collective
            over the default group, whose ranks must be RPC workers. Blocks; an error on one rank
            raises on all ranks.
        fill: Called with each new shard of this rank, to write the values.

    Raises:
        ValueError: The spec does not fit the size or the group, or an unsupported layout.
        RuntimeError: RPC is needed, and not initialized.
    """

    _process_group: ProcessGroup | NonMember
    _init_rrefs = False
    _remote: RemoteShards | None = None

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
        fill: Callable[[Shard], object] | None = None,
    ) -> ShardedTensor:
        def make() -> ShardedTensor:
            check_rrefs(init_rrefs)
            checks.check_formats(layout, memory_format)
            properties = TensorProperties(
                dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
            )
            metadata = checks.metadata_by(sharding_spec, checks.flat_size(size), properties)
            placed = places(process_group, metadata.shards_metadata)
            shards = checks.new_shards(metadata, placed, get_rank(), fill)
            return assemble(cls, sharding_spec, metadata, placed, shards, process_group)

        return cls._with_rrefs(make, init_rrefs)

    # A class with __new__ alone would pass its arguments on to Tensor.__init__.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def _with_rrefs(cls, make: Callable[[], ShardedTensor], init_rrefs: bool) -> ShardedTensor:
        """The tensor that ``make()`` returns; with ``init_rrefs``, ranks also exchange RRefs."""
        if not init_rrefs:
            return make()
        # Either all ranks come to the exchange, or none.
        tensor = checks.make_equal(
            make, lambda st: checks.describe(st.metadata()), "the tensor", None
        )
        tensor._share_rrefs()
        return tensor

    def _share_rrefs(self) -> None:
        from tilework.sharded import remote

        self._init_rrefs, self._remote = True, remote.share(self._local_shards)

    @classmethod
    def init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: int | Sequence[int],
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of each rank's local shards.

        Collective over the group; blocks. An error on one rank raises on all ranks.

        Args:
            local_shards: This rank's shards, used without a copy; may be empty on some ranks.
            global_size: The full tensor's shape, the same on every rank.

        Raises:
            ValueError: Shards do not fit this rank, each other, the size, or other ranks' shards.
        """
        tensor = from_local_shards.from_local_shards(
            cls, local_shards, global_size, process_group, init_rrefs
        )
        if init_rrefs:
            tensor._share_rrefs()
        return tensor

    @classmethod
    def init_from_local_tensor(
        cls,
        local_tensor: Tensor | None,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of one shard per rank, sharded by ``sharding_spec``.

        Collective over the group; blocks. An error on one rank raises on all ranks.

        Args:
            local_tensor: This rank's shard, contiguous; used without a copy. None on ranks without
                a shard in the spec.
            sharding_spec: Gives each rank of the group at most one shard.
            global_size: The full tensor's shape, the same on every rank.

        Raises:
            ValueError: The spec does not fit, or the tensor is not the rank's shard by the spec.
        """
        tensor = from_local_shards.from_local_tensor(
            cls, local_tensor, sharding_spec, global_size, process_group, init_rrefs
        )
        if init_rrefs:
            tensor._share_rrefs()
        return tensor

    @classmethod
    def from_local_shards_and_global_metadata(  # type: ignore[override]  # torch's order
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: AnyGroup = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor of shards and metadata that every rank has already.

        Nothing is communicated, except with ``init_rrefs``. The caller ensures that the metadata is
        the same on all ranks.

        Raises:
            ValueError: The metadata contradicts itself, the spec or the group, or this rank's
                shards are not those in the metadata.
        """

        def make() -> ShardedTensor:
            check_rrefs(init_rrefs)
            metadata = sharded_tensor_metadata
            checks.check_metadata(metadata)
            placed = places(process_group, metadata.shards_metadata)
            shards = checks.own_shards(local_shards, metadata, placed)
            spec = checks.given_or_inferred_spec(metadata, sharding_spec)
            return assemble(cls, spec, metadata, placed, shards, process_group)

        return cls._with_rrefs(make, init_rrefs)

    # torch's names
    _init_from_local_shards, _init_from_local_tensor = (
        init_from_local_shards,
        init_from_local_tensor,
    )
    _init_from_local_shards_and_global_metadata: Any = from_local_shards_and_global_metadata

    @property
    def process_group(self) -> ProcessGroup | NonMember:
        """The group whose ranks hold the shards."""
        return self._process_group

    @property
    def owners(self) -> tuple[int, ...]:
        """The global rank of each of the metadata's shards."""
        return self._shard_map.owners

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Gather the full tensor on one rank.

        Collective over the group; blocks. Ranks outside the group do nothing.

        Args:
            out: On ``dst``, a tensor of the same shape to write to; None on the others.
            enforce_dtype: Send shards in ``out``'s dtype, so that ``dst`` needs no room to convert.

        Raises:
            ValueError: ``out`` is missing on ``dst``, has another shape, or is given on another
                rank, or ``dst`` is not in the group. Raised on every rank.
        """
        moves.gather(self, dst, out, enforce_dtype, dtype)

    def full_tensor(self) -> Tensor:
        """The full tensor as a plain tensor, on every rank of the group.

        Collective over the group; blocks. Differentiable: the result is one value that all ranks
        hold; each shard's gradient is therefore a slice of the result's gradient.
        """
        return moves.full_tensor(self)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Reshard this tensor in place; return it.

        Collective over the group; blocks. Each rank receives only the parts that it lacks. It takes
        memory for the new shards and one bounded buffer. If this tensor is a leaf, the new shards
        are leaves without gradients; if it is a result, they are results, and gradients flow back,
        collectively. A tensor with RRefs makes new RRefs: then all ranks must call it.

        Args:
            resharding_spec: Any spec whose placements are on ranks of the group.

        Raises:
            ValueError: It is not a spec, or does not fit the tensor or the group; the tensor does
                not change.
        """
        return self._reshard_(resharding_spec, through_autograd=not graph_tiles(self)[0].is_leaf)

    def resharded(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """A new tensor with these values in other shards; gradients flow back to this tensor.

        Collective over the group, and so is backward through the result. The result has no
        ``remote_shards``.
        """
        alias = self._sharded_alike(self._local_shards, self._metadata)
        if not alias._local_shards:
            keep_stand_in(alias, graph_tiles(self)[0])
        return alias._reshard_(resharding_spec, through_autograd=self.requires_grad)

    def _reshard_(self, spec: ShardingSpec, through_autograd: bool) -> ShardedTensor:
        through_autograd = through_autograd and torch.is_grad_enabled()
        moves.reshard(self, spec, init_rrefs=self._init_rrefs, through_autograd=through_autograd)
        if self._init_rrefs:
            self._share_rrefs()
        return self

    def remote_shards(self) -> dict[int, list[RRef[Shard]]]:
        """RRefs to the other ranks' shards, by global rank; ranks without shards are left out.

        Raises:
            RuntimeError: The tensor was made with ``init_rrefs=False``, or from another tensor.
        """
        if self._remote is None:
            raise RuntimeError(
                "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available: "
                "make it with init_rrefs=True, after tilework.rpc.init_rpc"
            )
        return dict(sorted(self._remote.rrefs.items()))

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """This tensor in another dtype or on other devices; the same tensor if nothing changes.

        Local; not collective. Call it with the same arguments on every rank, because the metadata
        changes.

        Args:
            args: The arguments of torch.Tensor.to. Each rank's shards stay on that rank, on the
                current device of the given kind; another index is ignored with a warning.
            kwargs: As for ``args``, and ``process_group``: the group of the result, where the
                present group does not serve the new device.

        Raises:
            RuntimeError: A memory format other than contiguous or preserved.
        """
        return moves.to(self, *args, **kwargs)

    def cpu(
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: AnyGroup = None,
    ) -> ShardedTensor:
        """This tensor in CPU memory; the same tensor if it is there. See :meth:`to`."""
        return moves.to(self, "cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: AnyGroup = None,
    ) -> ShardedTensor:
        """This tensor on each rank's current CUDA device, always as a new object. See :meth:`to`.

        Shards that are on the device already are shared, not copied.

        Raises:
            ValueError: ``device`` is not this rank's current CUDA device.
        """
        return moves.to_current_device(
            self, "cuda", device, non_blocking, memory_format, process_group
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Only plain values and the local tensors: torch.load accepts them with weights_only.
        _, state = super().__reduce_ex__(protocol)
        saved_by = _rank_info(self._process_group)
        return _rebuild, (*state, saved_by, self._init_rrefs, torch.empty(0, device=self.device))


# -- saved and loaded --------------------------------------------------------------------------


class _Loading:
    """This rank's setting of :func:`load_with_process_group`; None outside of it."""

    group: AnyGroup = None


@contextmanager
def load_with_process_group(process_group: AnyGroup) -> Iterator[AnyGroup]:
    """Load sharded tensors onto ``process_group`` within the block.

    Raises:
        RuntimeError: Another group is set already.

    Example: ``with load_with_process_group(pg): state = torch.load(file)``.
    """
    state = current_world().state(_Loading)
    if state.group is not None:
        raise RuntimeError(
            "load_with_process_group is in effect already: leave that block before the next"
        )
    state.group = process_group
    try:
        yield process_group
    finally:
        state.group = None


def _as_loaded(
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    local: Sequence[tuple[Tensor, ShardMetadata]],
    device: torch.device,
) -> tuple[ShardedTensorMetadata, ShardingSpec, list[Shard]]:
    """The saved metadata, spec and shards, on the device of torch.load's ``map_location``."""
    own = [shard.placement for _, shard in local if shard.placement is not None]
    places = [shard.placement for shard in metadata.shards_metadata if shard.placement is not None]
    if local:
        moved = not all(covers(place.device(), device) for place in own)
    else:
        moved = device.type not in {place.device().type for place in places}
    if not moved:
        return metadata, spec, [Shard(tensor, shard) for tensor, shard in local]
    shards = [Shard(tensor, shard.moved(device)) for tensor, shard in local]
    return metadata.moved(device), spec.moved(device), shards


#: The rank in the group, the global rank, the size of the group, the world size.
_RankInfo = tuple[int, int, int, int]


def _rank_info(group: AnyGroup) -> _RankInfo:
    """This rank's group rank and global rank, and both sizes: saved with a tensor."""
    return get_rank(group), get_rank(), get_world_size(group), get_world_size()


def _group_to_load_onto(saved: _RankInfo) -> ProcessGroup | NonMember:
    """The group of :func:`load_with_process_group`, else the default group, if it fits."""
    given = current_world().state(_Loading).group
    group = get_default_group() if given is None else given
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, then, now in zip(names, saved, _rank_info(group), strict=True):
        if then != now:
            raise RuntimeError(
                f"{name} at save time was {then}, but at load time was {now}. Load on the "
                f"ranks that saved, with load_with_process_group(…) for another group; to load on "
                f"others, save full_tensor() or reshard first"
            )
    return group


if TYPE_CHECKING:
    from tilework.rpc import RRef
    from tilework.sharded.remote import RemoteShards


def _rebuild(
    shards: list[tuple[Tensor, ShardMetadata]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    is_parameter: bool,
    saved_by: _RankInfo,
    init_rrefs: bool,
    on_device: Tensor,
) -> ShardedTensor:
    """A pickled tensor, loaded onto the current group and the device of ``on_device``."""

    def make() -> ShardedTensor:
        group = _group_to_load_onto(saved_by)
        checks.check_metadata(metadata)
        loaded, new_spec, local = _as_loaded(metadata, spec, shards, on_device.device)
        placed = places(group, loaded.shards_metadata)
        return assemble(ShardedTensor, new_spec, loaded, placed, local, group)

    if not is_initialized():
        raise RuntimeError(
            "Need to initialize default process group using init_process_group before loading "
            "a ShardedTensor"
        )
    tensor = ShardedTensor._with_rrefs(make, init_rrefs)
    mark_parameter(tensor, is_parameter)
    return tensor


# torch.load accepts these with weights_only=True, besides tensors and containers.
torch.serialization.add_safe_globals(
    [
        _rebuild,
        rebuild_base,
        _named_properties,
        Items,
        RemoteDevice,
        ShardMetadata,
        ShardedTensorMetadata,
        ChunkShardingSpec,
        EnumerableShardingSpec,
    ]
)


# -- torch.compile leaves sharded tensors alone ------------------------------------------------


_NOT_TRACED = (
    "operators on sharded tensors are not traced, since they communicate; compile without "
    "fullgraph=True, or compile what is done with the local tensors"
)

for _kind in (ShardedTensorBase, ShardedTensor):
    for _method in vars(_kind).values():
        _function = inspect.unwrap(getattr(_method, "__func__", _method))
        if inspect.isfunction(_function):
            leave_function(_function, _NOT_TRACED)
