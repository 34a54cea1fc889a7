"""A sharded tensor's values moved to another tiling, to one rank or all, or to other devices.

Gradients move the other way.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.operations.internal import agree, agree_equal, run_plan
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    resolve,
)
from tilework.layout import Tiling
from tilework.layout.internal import replicated_tiling, transfer_plan
from tilework.mesh.internal import check_device_is_there
from tilework.sharded import checks
from tilework.sharded.base import ShardedTensorBase, graph_tiles, keep_stand_in, wrap_results
from tilework.sharded.checks import Place, check_rrefs, places
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, ShardMap
from tilework.sharded.specs import ShardingSpec
from tilework.tiled import TiledTensor

BaseT = TypeVar("BaseT", bound=ShardedTensorBase)


def has_values(tensor: ShardedTensorBase) -> bool:
    """True if all shards are on real devices, False if on the meta device; equal on all ranks."""
    places = [shard.placement for shard in tensor.metadata().shards_metadata]
    real = {place.device().type != "meta" for place in places if place is not None}
    if len(real) > 1:
        raise ValueError(
            "some shards are on the meta device, where there are no values to move: move the "
            "others there too, with to('meta')"
        )
    return real != {False}


def reshard(
    tensor: ShardedTensorBase,
    spec: ShardingSpec,
    *,
    init_rrefs: bool = False,
    through_autograd: bool = False,
) -> None:
    """Shard a tensor by another spec, in place; RRefs are only checked. Collective; blocks."""
    group = tensor._process_group

    def prepare() -> tuple[ShardedTensorMetadata, list[Place]]:
        check_rrefs(init_rrefs)
        before = tensor.metadata()
        metadata = checks.metadata_by(spec, before.size, before.tensor_properties)
        placed = places(group, metadata.shards_metadata)
        if not has_values(tensor) and any(device.type != "meta" for _, device in placed):
            raise ValueError(
                "reshard: a tensor on the meta device has no values to move elsewhere: make a new "
                "one, or reshard to placements on 'meta'"
            )
        return metadata, placed

    metadata, placed = checks.make_equal(
        prepare, lambda prepared: checks.describe(prepared[0]), "resharding_spec", group
    )
    shard_map = ShardMap(metadata, [owner for owner, _ in placed])
    tiles: list[Tensor] = []
    if not isinstance(group, NonMember):
        tiles = _new_tiles(tensor, shard_map.tiling, through_autograd)
    own = shard_map.tiling.of(get_rank())
    shards = [
        Shard(tile.to(placed[i][1]), metadata.shards_metadata[i])
        for i, tile in zip(own, tiles, strict=False)  # without shards there may be a stand-in
    ]
    tensor._sharding_spec, tensor._metadata = spec, metadata
    tensor._shard_map, tensor._local_shards = shard_map, shards
    if tiles and not shards:
        keep_stand_in(tensor, tiles[0])


def _new_tiles(tensor: ShardedTensorBase, target: Tiling, through_autograd: bool) -> list[Tensor]:
    if through_autograd:
        return list(_MoveTiles.apply(tensor, target, *graph_tiles(tensor)))  # type: ignore[no-untyped-call]
    gradient = tensor.metadata().tensor_properties.requires_grad
    return [tile.requires_grad_(gradient) for tile in move_tiles(tensor, target)]


class _MoveTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: ShardedTensorBase, target: Tiling, *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = target, tensor.tiling, tensor._process_group
        return _or_stand_in(move_tiles(tensor, target), tiles[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, target, group = ctx.back
        held = gradients if source.of(get_rank()) else ()
        moved = _transfer(source, target, group, held, gradients[0])
        return None, None, *_or_stand_in(moved, gradients[0])


def _or_stand_in(tiles: list[Tensor], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(tiles) or (like.new_zeros((0,) * like.dim()),)


@torch.no_grad()
def move_tiles(tensor: ShardedTensorBase, target: Tiling) -> list[Tensor]:
    """This rank's tiles of ``target``, as new tensors on the same devices. Collective."""
    like = graph_tiles(tensor)[0]
    return _transfer(tensor.tiling, target, tensor._process_group, tensor.local_tiles(), like)


def _transfer(
    source: Tiling, target: Tiling, group: AnyGroup, tiles: Sequence[Tensor], like: Tensor
) -> list[Tensor]:
    if like.is_meta:
        sizes = [box.sizes for box in target.boxes_of(get_rank())]
        return [like.new_empty(size) for size in sizes]
    plan = transfer_plan(source, target, get_rank())
    return run_plan(plan, tiles, group, dtype=like.dtype, device=like.device)


# -- to the sharding of another tensor ---------------------------------------------------------


def reshard_like(source: Tensor, like: BaseT) -> BaseT:
    """The values of ``source``, sharded and placed as ``like``, without gradients.

    Collective over the group of ``like`` if ``source`` is sharded; else each rank takes a slice.
    Tiles that need not move are not copied.
    """
    if source.shape != like.shape:
        raise ValueError(
            f"cannot copy the values of a tensor of size {tuple(source.shape)} to a tensor of size "
            f"{tuple(like.shape)}: the sizes must be equal"
        )
    tiles = [tile.detach() for tile in _tiles(source, like)]
    placed = zip(tiles, like.local_tiles(), strict=True)
    return like.like(
        [tile.to(own.device) for tile, own in placed], dtype=source.dtype, requires_grad=False
    )


def _tiles(source: Tensor, like: ShardedTensorBase) -> list[Tensor]:
    if not isinstance(source, ShardedTensorBase):
        return [source[shard.metadata.box.slices] for shard in like.local_shards()]
    if source.tiling == like.tiling:
        return source.local_tiles()
    group = like._process_group
    if isinstance(group, NonMember):
        return []
    members = get_process_group_ranks(group)
    outside = [rank for rank in source.tiling.ranks if rank not in members]
    if outside:
        raise ValueError(
            f"ranks {outside} hold shards of the tensor, but are not in the group of ranks "
            f"{members} that is to get the values: reshard the tensor onto ranks {members} first"
        )
    plan = transfer_plan(source.tiling, like.tiling, get_rank())
    return run_plan(plan, source.local_tiles(), group, dtype=source.dtype)


def describe_value(value: object) -> str:
    """The type, dtype, size and layout of a value, for ranks to compare before they move it."""
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = f"{value.dtype} of size {list(value.shape)}"
    if not isinstance(value, ShardedTensorBase):
        return f"a plain tensor, {kind}"
    return f"a sharded tensor, {kind} by {value.sharding_spec()}"


# -- to one rank, or to all --------------------------------------------------------------------


def gather(
    tensor: ShardedTensorBase,
    dst: int,
    out: Tensor | None,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> None:
    """See :meth:`ShardedTensor.gather`."""
    group = tensor._process_group
    if isinstance(group, NonMember):
        return
    if enforce_dtype:  # known only on dst
        dtypes = agree(lambda: getattr(_checked_out(tensor, dst, out), "dtype", None), group)
        members = get_process_group_ranks(group)
        dtype = dtypes[get_group_rank(group, dst)] if dst in members else None
    # The wrapper's attributes are intercepted, which takes longer.
    properties = tensor.metadata().tensor_properties
    sent = dtype or properties.dtype
    tiles, into, real = list[Tensor](), list[Tensor](), True

    def facts() -> dict[str, Any]:
        # Memory is allocated here, so that all ranks raise if it fails.
        nonlocal real
        target, real = _checked_out(tensor, dst, out), has_values(tensor)
        if real:
            tiles.extend(tile.detach().to(sent) for tile in tensor.local_tiles())
        if real and target is not None:
            into.append(_receive_buffer(target, sent, tensor.device))
        return {"dst": dst, "enforce_dtype": bool(enforce_dtype), "dtype": str(dtype)}

    agree_equal(facts, group)
    if not real:
        return
    target = replicated_tiling(tuple(tensor.metadata().size), (dst,))
    plan = transfer_plan(tensor.tiling, target, get_rank())
    run_plan(plan, tiles, group, out=into or None, dtype=sent)
    if out is not None and out.data_ptr() != into[0].data_ptr():
        with torch.no_grad():
            out.copy_(into[0])


def _receive_buffer(out: Tensor, sent: torch.dtype, device: torch.device) -> Tensor:
    """``out`` itself, if it has the dtype ``sent`` and type of ``device``; else a new buffer."""
    if (out.dtype, out.device.type) == (sent, device.type):
        return out.detach()
    return torch.empty(out.shape, dtype=sent, device=device)


def _checked_out(tensor: ShardedTensorBase, dst: int, out: Tensor | None) -> Tensor | None:
    ranks, rank = get_process_group_ranks(tensor._process_group), get_rank()
    if dst not in ranks:
        raise ValueError(f"dst={dst!r} is not part of the tensor's group of ranks {ranks}")
    if rank != dst:
        if out is not None:
            raise ValueError(
                f"Argument `out` must NOT be specified on non-destination ranks: this is rank "
                f"{rank}, dst is {dst}"
            )
        return None
    if out is None:
        raise ValueError(
            f"Argument `out` must be specified on destination rank {dst}: a tensor of size "
            f"{tuple(tensor.shape)}"
        )
    if not isinstance(out, Tensor) or isinstance(out, TiledTensor):
        raise TypeError(f"Argument `out` must be a plain tensor, got {type(out).__name__}")
    if out.shape != tensor.metadata().size:
        raise ValueError(
            f"Argument `out` has size {tuple(out.shape)}, but should be {tuple(tensor.shape)}"
        )
    if out.is_meta and has_values(tensor):
        raise ValueError("Argument `out` is on the meta device, where nothing can be written")
    return out


def full_tensor(tensor: ShardedTensorBase) -> Tensor:
    """See :meth:`ShardedTensor.full_tensor`."""
    group = tensor._process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"full_tensor: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    if not has_values(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    everywhere = replicated_tiling(tuple(tensor.shape), tuple(get_process_group_ranks(group)))
    full: Tensor
    (full,) = _MoveTiles.apply(tensor, everywhere, *graph_tiles(tensor))  # type: ignore[no-untyped-call]
    return full


# -- to another dtype or device ----------------------------------------------------------------


def to(tensor: BaseT, *args: Any, **kwargs: Any) -> BaseT:
    """See :meth:`ShardedTensor.to`."""
    group: AnyGroup = kwargs.pop("process_group", None)
    copy = kwargs.pop("copy", False)
    _check_format(kwargs.pop("memory_format", None))
    with torch._C.DisableTorchFunctionSubclass():  # the other tensor may be sharded, too
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device and _own_device(device), dtype or tensor.dtype
    stays = group is None or resolve(group) is tensor._process_group
    if _is_on(tensor, device) and dtype == tensor.dtype and stays and not copy:
        return tensor
    tiles = [tile.to(device, dtype, non_blocking, copy) for tile in graph_tiles(tensor)]
    return wrap_results(tensor, tiles, device and torch.device(device.type), group)


def to_current_device(
    tensor: BaseT,
    device_type: str,
    device: torch.device | str | int | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    group: AnyGroup,
) -> BaseT:
    """See :meth:`ShardedTensor.cuda`; this serves any type of device."""
    _check_format(memory_format)
    current = _current_device(device_type)
    if device is not None:
        if isinstance(device, int):
            asked = torch.device(device_type, device)
        else:
            asked = torch.device(device)
        if asked not in (current, torch.device(device_type)):
            raise ValueError(
                f"a sharded tensor moves to each rank's current device: got {device!r}, expected "
                f"{device_type!r} or {current}; call torch.{device_type}.set_device on each rank "
                f"first"
            )
    tiles = [tile.to(current, non_blocking=non_blocking) for tile in graph_tiles(tensor)]
    return wrap_results(tensor, tiles, torch.device(device_type), group)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported! (for sharded "
            f"tensors, got {memory_format})"
        )


def _own_device(device: torch.device) -> torch.device:
    """This rank's current device of the type of ``device``; warn if ``device`` is another."""
    current = _current_device(device.type)
    if device.index not in (None, current.index):
        warnings.warn(
            f"ShardedTensor.to moves each rank's shards to its current device, here {current}, not "
            f"to {device}: call torch.{device.type}.set_device on each rank first, or reshard",
            UserWarning,
            stacklevel=4,
        )
    return current


def _current_device(device_type: str) -> torch.device:
    check_device_is_there(device_type, f"a ShardedTensor on {device_type}")
    current = getattr(getattr(torch, device_type, None), "current_device", None)
    if device_type == "cpu" or current is None:
        return torch.device(device_type)
    return torch.device(device_type, current())


def _is_on(tensor: ShardedTensorBase, device: torch.device | None) -> bool:
    """True if all shards are on this type of device, and this rank's shards on this very device."""
    if device is None:
        return True
    places = [shard.placement for shard in tensor.metadata().shards_metadata]
    return all(tile.device == device for tile in tensor.local_tiles()) and all(
        place is None or place.device().type == device.type for place in places
    )
