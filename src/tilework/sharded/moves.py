"""What moves a sharded tensor's values: between ranks by plans, between devices and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.agreement import agree
from tilework.comm.transfer import run_plan
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank
from tilework.layout import Box, Tile, Tiling, plan
from tilework.sharded.metadata import Shard, ShardedTensorMetadata, tiling_of
from tilework.sharded.placement import parse_and_validate_remote_device
from tilework.sharded.specs import ShardingSpec

if TYPE_CHECKING:
    from tilework.sharded.tensor import ShardedTensor


def whole_on(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Tiling:
    """All of a tensor, on each of these ranks."""
    return Tiling.of_tiles(shape, [Tile(Box((0,) * len(shape), shape), ranks)])


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
    agree(lambda: _check_out(tensor, dst, out), group)
    if enforce_dtype:
        # Only dst knows it; the others hear of it.
        dtype = agree(lambda: None if out is None else out.dtype, group)[group.group_ranks[dst]]
    sent = dtype or tensor.dtype
    steps = plan(tensor.tiling, whole_on(tuple(tensor.shape), (dst,)), get_rank())
    tiles = [tile.detach().to(sent) for tile in tensor.local_tiles()]
    into = None if out is None else [out if out.dtype == sent else out.to(sent)]
    run_plan(steps, tiles, group, out=into, dtype=sent)
    if out is not None and into is not None and into[0] is not out:
        out.copy_(into[0])


def _check_out(tensor: ShardedTensor, dst: int, out: Tensor | None) -> None:
    ranks, rank = get_process_group_ranks(tensor.process_group), get_rank()
    if dst not in ranks:
        raise ValueError(f"dst={dst} is not part of the tensor's group of ranks {ranks}")
    if rank != dst:
        if out is not None:
            raise ValueError(
                f"Argument `out` must NOT be specified on non-destination ranks: this is rank "
                f"{rank}, dst is {dst}"
            )
        return
    if out is None:
        raise ValueError(
            f"Argument `out` must be specified on destination rank {dst}: a tensor of size "
            f"{tuple(tensor.shape)}"
        )
    if out.shape != tensor.shape:
        raise ValueError(
            f"Argument `out` has size {tuple(out.shape)}, but should be {tuple(tensor.shape)}"
        )


def full_tensor(tensor: ShardedTensor) -> Tensor:
    """See :meth:`ShardedTensor.full_tensor`."""
    group = tensor.process_group
    if isinstance(group, NonMember):
        raise ValueError(
            f"full_tensor: rank {get_rank()} is not in the tensor's group of ranks "
            f"{list(group.global_ranks)}"
        )
    found: Tensor = _Whole.apply(tensor, *tensor.local_tiles())  # type: ignore[no-untyped-call]
    return found


class _Whole(torch.autograd.Function):
    """All tiles on all ranks. Backward takes the own part: all ranks hold the same gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, *tiles: Tensor) -> Tensor:
        ranks = tuple(get_process_group_ranks(tensor.process_group))
        ctx.boxes = [shard.metadata.box for shard in tensor.local_shards()]
        steps = plan(tensor.tiling, whole_on(tuple(tensor.shape), ranks), get_rank())
        return run_plan(steps, tiles, tensor.process_group, dtype=tensor.dtype)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(gradient[box.slices].clone() for box in ctx.boxes)


def reshard(
    tensor: ShardedTensor, spec: ShardingSpec
) -> tuple[ShardingSpec, ShardedTensorMetadata, tuple[int, ...], list[Shard]]:
    """What the tensor is made of once it is cut by ``spec``."""
    group = tensor.process_group
    if not isinstance(spec, ShardingSpec):
        raise ValueError(
            f"Expecting ShardingSpec but got: {type(spec).__name__}; make a ChunkShardingSpec or "
            f"an EnumerableShardingSpec"
        )
    metadata = spec.build_metadata(tensor.shape, tensor.metadata().tensor_properties)
    placed = [
        parse_and_validate_remote_device(group, s.placement) for s in metadata.shards_metadata
    ]
    owners = tuple(owner for owner, _ in placed)
    target = tiling_of(metadata, owners)
    if isinstance(group, NonMember):
        return spec, metadata, owners, []
    mine = [metadata.shards_metadata[i] for i in target.of(get_rank())]
    devices = [placed[i][1] for i in target.of(get_rank())]
    steps = plan(tensor.tiling, target, get_rank())
    with torch.no_grad():
        tiles = run_plan(steps, tensor.local_tiles(), group, dtype=tensor.dtype)
    gradient = metadata.tensor_properties.requires_grad
    shards = [
        Shard(tile.to(device).requires_grad_(gradient), shard)
        for tile, device, shard in zip(tiles, devices, mine, strict=True)
    ]
    return spec, metadata, owners, shards


def to(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """See :meth:`ShardedTensor.to`."""
    group: AnyGroup = kwargs.pop("process_group", None)
    copy = kwargs.pop("copy", False)
    memory_format = kwargs.pop("memory_format", None)
    _check_format(memory_format)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    dtype = dtype or tensor.dtype
    if device is not None and device.type != "cpu" and device.index is None:
        device = _current(device.type)
    same_device = device is None or all(d == device for d in _devices(tensor))
    if same_device and dtype == tensor.dtype and group is None and not copy:
        return tensor
    tiles = [tile.to(device, dtype, non_blocking, copy) for tile in tensor.local_tiles()]
    return tensor._on(tiles, dtype, device, group)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported for sharded "
            f"tensors, got {memory_format}"
        )


def cuda(
    tensor: ShardedTensor,
    device: torch.device | str | int | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    group: AnyGroup,
) -> ShardedTensor:
    """See :meth:`ShardedTensor.cuda`."""
    _check_format(memory_format)
    current = _current("cuda")
    if device is not None:
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if asked not in (current, torch.device("cuda")):
            raise ValueError(
                f"a sharded tensor moves to each rank's current device: got {device!r}, expected "
                f"'cuda' or {current}; call torch.cuda.set_device on each rank first"
            )
    tiles = [tile.to(current, non_blocking=non_blocking) for tile in tensor.local_tiles()]
    return tensor._on(tiles, tensor.dtype, current, group)


def _current(kind: str) -> torch.device:
    """This rank's device of a kind."""
    module = getattr(torch, kind, None)
    if module is None or not hasattr(module, "current_device"):
        return torch.device(kind)
    return torch.device(kind, module.current_device())


def _devices(tensor: ShardedTensor) -> list[torch.device]:
    """Those of all shards; where a rank is told none, its own are as good as any."""
    mine = [tile.device for tile in tensor.local_tiles()]
    others = [s.placement.device() for s in tensor.metadata().shards_metadata if s.placement]
    return mine or others
