"""Saved sharded tensors: the group and device on which they are loaded again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    current_world,
    get_default_group,
    get_rank,
    get_world_size,
    is_initialized,
)
from tilework.sharded.device import covers
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata
from tilework.sharded.specs import ShardingSpec


class _Loading:
    """This rank's setting of :func:`load_with_process_group`; None outside of it."""

    group: AnyGroup = None


@contextmanager
def load_with_process_group(process_group: AnyGroup) -> Iterator[AnyGroup]:
    """Load sharded tensors onto ``process_group`` within the block.

    Raises:
        RuntimeError: Another group is set already.

    Example:
        >>> import io, torch
        >>> import tilework.distributed as dist
        >>> from tilework.sharded import ChunkShardingSpec, load_with_process_group, ones
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     pg = dist.new_group([0, 1])
        ...     spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     file = io.BytesIO()
        ...     torch.save(ones(spec, 4, process_group=pg), file)
        ...     file.seek(0)
        ...     with load_with_process_group(pg):
        ...         return torch.load(file).process_group is pg
        >>> run_ranks(2, program)
        [True, True]
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


def current_process_group() -> ProcessGroup | NonMember:
    """The group of :func:`load_with_process_group`, else the default group."""
    group = current_world().state(_Loading).group
    return get_default_group() if group is None else group


def as_loaded(
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    local: Sequence[tuple[Tensor, ShardMetadata]],
    device: torch.device,
) -> tuple[ShardedTensorMetadata, ShardingSpec, list[Shard]]:
    """The saved metadata, spec and shards, on the device given by torch.load's ``map_location``.

    The device comes from a saved empty tensor, because ranks without shards need it, too.
    """
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
RankInfo = tuple[int, int, int, int]


def rank_info(group: AnyGroup) -> RankInfo:
    """This rank's group rank and global rank, and both sizes: saved with a tensor."""
    return get_rank(group), get_rank(), get_world_size(group), get_world_size()


def check_there_is_a_group() -> None:
    """Raise RuntimeError if there is no default group to load onto."""
    if not is_initialized():
        raise RuntimeError(
            "Need to initialize default process group using init_process_group before loading "
            "a ShardedTensor"
        )


def group_to_load_onto(saved: RankInfo) -> ProcessGroup | NonMember:
    """The group of a tensor that is being loaded.

    Raises:
        RuntimeError: There is no default group, or ranks or sizes differ from those at saving.
    """
    check_there_is_a_group()
    group = current_process_group()
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, then, now in zip(names, saved, rank_info(group), strict=True):
        if then != now:
            raise RuntimeError(
                f"{name} at save time was {then}, but at load time was {now}. Load on the "
                f"ranks that saved, with load_with_process_group(…) for another group; to load on "
                f"others, save full_tensor() or reshard first"
            )
    return group
