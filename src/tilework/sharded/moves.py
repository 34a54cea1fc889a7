"""What moves a sharded tensor's values: between ranks by plans, between devices and dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.agreement import agree, agree_equal
from tilework.comm.transfer import run_plan
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    resolve,
)
from tilework.layout import Tiling
from tilework.sharded import checks
from tilework.sharded.graph import graph_tiles
from tilework.sharded.metadata import Geometry, Shard, ShardedTensorMetadata
from tilework.sharded.placement import Place, check_rrefs, places
from tilework.sharded.specs import ShardingSpec
from tilework.tiled.tensor import TiledTensor
from tilework.tiled.transfer_plans import replicated_tiling, transfer_plan

if TYPE_CHECKING:
    from tilework.sharded.tensor import ShardedTensor


def has_values(tensor: ShardedTensor) -> bool:
    """Whether the shards are on real devices; the same on every rank.

    Raises:
        ValueError: Only some are.
    """
    places = [shard.placement for shard in tensor.metadata().shards_metadata]
    real = {place.device().type != "meta" for place in places if place is not None}
    if len(real) > 1:
        raise ValueError(
            "some shards are on the meta device, where there are no values to move: move the "
            "others there too, with to('meta')"
        )
    return real != {False}


def gather(
    tensor: ShardedTensor,
    dst: int,
    out: Tensor | None,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> None:
    """See :meth:`ShardedTensor.gather`."""
    group = tensor.process_group
    if isinstance(group, NonMember):
        return
    if enforce_dtype:  # which only dst knows
        told = agree(lambda: getattr(_checked_out(tensor, dst, out), "dtype", None), group)
        dtype = told[get_group_rank(group, dst)] if dst in group.global_ranks else None
    # A wrapper's own attributes are intercepted, which takes longer.
    properties = tensor.metadata().tensor_properties
    sent = dtype or properties.dtype
    tiles, into, real = list[Tensor](), list[Tensor](), True

    def facts() -> dict[str, Any]:
        # Memory is made here, so that all ranks hear of it if there is none.
        nonlocal real
        target, real = _checked_out(tensor, dst, out), has_values(tensor)
        if real:
            tiles.extend(tile.detach().to(sent) for tile in tensor.local_tiles())
        if real and target is not None:
            into.append(_as_sent(target, sent, tensor.device))
        return {"dst": dst, "enforce_dtype": bool(enforce_dtype), "dtype": str(dtype)}

    agree_equal(facts, group)
    if not real:
        return
    steps = transfer_plan(
        tensor.tiling, replicated_tiling(tuple(tensor.metadata().size), (dst,)), get_rank()
    )
    run_plan(steps, tiles, group, out=into or None, dtype=sent)
    if out is not None and out.data_ptr() != into[0].data_ptr():
        with torch.no_grad():
            out.copy_(into[0])


def _as_sent(out: Tensor, sent: torch.dtype, device: torch.device) -> Tensor:
    """``out``, or what comes before it where it is of another dtype or elsewhere."""
    if (out.dtype, out.device.type) == (sent, device.type):
        return out.detach()
    return torch.empty(out.shape, dtype=sent, device=device)


def _checked_out(tensor: ShardedTensor, dst: int, out: Tensor | None) -> Tensor | None:
    ranks, rank = get_process_group_ranks(tensor.process_group), get_rank()
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


def full_tensor(tensor: ShardedTensor) -> Tensor:
    """See :meth:`ShardedTensor.full_tensor`."""
    group = tensor.process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"full_tensor: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    if not has_values(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    found: Tensor = _Whole.apply(tensor, *graph_tiles(tensor))  # type: ignore[no-untyped-call]
    return found


class _Whole(torch.autograd.Function):
    """All tiles on all ranks. Backward takes the own part: all ranks hold the same gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, *tiles: Tensor) -> Tensor:
        ranks = tuple(get_process_group_ranks(tensor.process_group))
        ctx.boxes = tensor.tiling.boxes_of(get_rank())
        ctx.stand_in = None if ctx.boxes else tiles[0].detach()
        return _moved(tensor, replicated_tiling(tuple(tensor.shape), ranks))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.stand_in is not None:
            return None, torch.zeros_like(ctx.stand_in)
        return None, *(gradient[box.slices].clone() for box in ctx.boxes)


def reshard(
    tensor: ShardedTensor, spec: ShardingSpec, through_autograd: bool
) -> tuple[ShardedTensorMetadata, Geometry, list[Shard], Tensor | None]:
    """What the tensor is made of once it is cut by ``spec``; the last is a rank's stand-in.

    The new tiles are leaves, or, ``through_autograd``, such that gradients flow back.
    """
    group = tensor.process_group

    def make() -> tuple[ShardedTensorMetadata, list[Place]]:
        check_rrefs(tensor._init_rrefs)
        before = tensor.metadata()
        metadata = checks.metadata_by(spec, before.size, before.tensor_properties)
        placed = places(group, metadata.shards_metadata)
        if not has_values(tensor) and any(device.type != "meta" for _, device in placed):
            raise ValueError(
                "reshard: a tensor on the meta device has no values to move elsewhere: make a new "
                "one, or reshard to placements on 'meta'"
            )
        return metadata, placed

    metadata, placed = checks.agree_on(
        make, lambda made: checks.describe(made[0]), "resharding_spec", group
    )
    geometry = Geometry(metadata, [owner for owner, _ in placed])
    if isinstance(group, NonMember):
        return metadata, geometry, [], None
    mine = geometry.tiling.of(get_rank())
    if through_autograd:
        tiles = list(_Move.apply(tensor, geometry.tiling, *graph_tiles(tensor)))  # type: ignore[no-untyped-call]
    else:
        gradient = metadata.tensor_properties.requires_grad
        tiles = [tile.requires_grad_(gradient) for tile in _moved(tensor, geometry.tiling)]
    if not mine:
        return metadata, geometry, [], tiles[0] if tiles else None
    shards = [
        Shard(tile.to(placed[i][1]), metadata.shards_metadata[i])
        for i, tile in zip(mine, tiles, strict=True)
    ]
    return metadata, geometry, shards, None


class _Move(torch.autograd.Function):
    """Tiles from one tiling to another; their gradients the other way. For none, a stand-in."""

    @staticmethod
    def forward(
        ctx: Any, tensor: ShardedTensor, target: Tiling, *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = target, tensor.tiling, tensor.process_group
        return _or_stand_in(_moved(tensor, target), tiles[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, target, group = ctx.back
        held = gradients if source.of(get_rank()) else ()
        moved = _carried(source, target, group, held, gradients[0])
        return None, None, *_or_stand_in(moved, gradients[0])


def _or_stand_in(tiles: list[Tensor], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(tiles) or (like.new_zeros((0,) * like.dim()),)


@torch.no_grad()
def _moved(tensor: ShardedTensor, target: Tiling) -> list[Tensor]:
    """This rank's tiles of ``target``, as new tensors where the old ones are. Collective."""
    like = graph_tiles(tensor)[0]
    return _carried(tensor.tiling, target, tensor.process_group, tensor.local_tiles(), like)


def _carried(
    source: Tiling, target: Tiling, group: AnyGroup, tiles: Sequence[Tensor], like: Tensor
) -> list[Tensor]:
    if like.is_meta:
        sizes = [box.sizes for box in target.boxes_of(get_rank())]
        return [like.new_empty(size) for size in sizes]
    steps = transfer_plan(source, target, get_rank())
    return run_plan(steps, tiles, group, dtype=like.dtype, device=like.device)


def to(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """See :meth:`ShardedTensor.to`."""
    group: AnyGroup = kwargs.pop("process_group", None)
    copy = kwargs.pop("copy", False)
    _check_format(kwargs.pop("memory_format", None))
    with torch._C.DisableTorchFunctionSubclass():  # the other tensor may be sharded too
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device and _own(device), dtype or tensor.dtype
    stays = group is None or resolve(group) is tensor.process_group
    if _is_on(tensor, device) and dtype == tensor.dtype and stays and not copy:
        return tensor
    tiles = [tile.to(device, dtype, non_blocking, copy) for tile in graph_tiles(tensor)]
    return tensor.of_results(tiles, device and torch.device(device.type), group)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported! (for sharded "
            f"tensors, got {memory_format})"
        )


def to_current(
    tensor: ShardedTensor,
    kind: str,
    device: torch.device | str | int | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    group: AnyGroup,
) -> ShardedTensor:
    """See :meth:`ShardedTensor.cuda`, which is this for the kind "cuda"."""
    _check_format(memory_format)
    current = _current(kind)
    if device is not None:
        asked = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        if asked not in (current, torch.device(kind)):
            raise ValueError(
                f"a sharded tensor moves to each rank's current device: got {device!r}, expected "
                f"{kind!r} or {current}; call torch.{kind}.set_device on each rank first"
            )
    tiles = [tile.to(current, non_blocking=non_blocking) for tile in graph_tiles(tensor)]
    return tensor.of_results(tiles, torch.device(kind), group)


def _own(device: torch.device) -> torch.device:
    """This rank's device of that kind."""
    current = _current(device.type)
    if device.index not in (None, current.index):
        warnings.warn(
            f"ShardedTensor.to moves each rank's shards to its current device, here {current}, not "
            f"to {device}: call torch.{device.type}.set_device on each rank first, or reshard",
            UserWarning,
            stacklevel=4,
        )
    return current


def _current(kind: str) -> torch.device:
    current = getattr(getattr(torch, kind, None), "current_device", None)
    return torch.device(kind) if kind == "cpu" or current is None else torch.device(kind, current())


def _is_on(tensor: ShardedTensor, device: torch.device | None) -> bool:
    """Whether all shards are on this kind of device, and this rank's on this one."""
    if device is None:
        return True
    places = [shard.placement for shard in tensor.metadata().shards_metadata]
    return all(tile.device == device for tile in tensor.local_tiles()) and all(
        place is None or place.device().type == device.type for place in places
    )
