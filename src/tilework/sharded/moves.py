"""What moves a sharded tensor's values: between ranks by plans, between devices and dtypes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm.agreement import agree
from tilework.comm.transfer import run_plan
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank, resolve
from tilework.layout import Box, Tile, Tiling, plan
from tilework.sharded import checks
from tilework.sharded.metadata import Geometry, Shard, ShardedTensorMetadata, ShardMetadata
from tilework.sharded.placement import Place, places
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
    sent = _agreed_dtype(tensor, dst, out, enforce_dtype, dtype)
    if tensor.is_meta:
        return
    steps = plan(tensor.tiling, whole_on(tuple(tensor.shape), (dst,)), get_rank())
    tiles = [tile.detach().to(sent) for tile in tensor.local_tiles()]
    if out is None:
        run_plan(steps, tiles, group, dtype=sent)
        return
    with torch.no_grad():
        direct = (out.dtype, out.device.type) == (sent, tensor.device.type)
        into = out.detach() if direct else torch.empty(out.shape, dtype=sent, device=tensor.device)
        run_plan(steps, tiles, group, out=[into], dtype=sent)
        if not direct:
            out.copy_(into)


def _agreed_dtype(
    tensor: ShardedTensor,
    dst: int,
    out: Tensor | None,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> torch.dtype:
    """What all ranks send, once all have found their arguments right. Collective."""

    def say() -> tuple[int, bool, str, str]:
        _check_out(tensor, dst, out)
        wanted = str(None if out is None else out.dtype)
        return dst, bool(enforce_dtype), str(dtype), wanted

    group = tensor.process_group
    said, ranks = agree(say, group), get_process_group_ranks(group)
    for rank, other in zip(ranks, said, strict=True):
        if other[:3] != said[0][:3]:
            raise ValueError(
                f"gather: (dst, enforce_dtype, dtype) must be the same on all ranks, found "
                f"{said[0][:3]} on rank {ranks[0]} and {other[:3]} on rank {rank}"
            )
    if enforce_dtype:
        found = getattr(torch, said[ranks.index(dst)][3].removeprefix("torch."))
        assert isinstance(found, torch.dtype)
        return found
    return dtype or tensor.dtype


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
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient[box.slices].clone() for box in ctx.boxes)


def reshard(
    tensor: ShardedTensor, spec: ShardingSpec
) -> tuple[ShardedTensorMetadata, list[Place], list[Shard]]:
    """What the tensor is made of once it is cut by ``spec``."""
    group = tensor.process_group

    def make() -> tuple[ShardedTensorMetadata, list[Place]]:
        properties = tensor.metadata().tensor_properties
        metadata = checks.check_spec(spec).build_metadata(tensor.shape, properties)
        placed = places(group, metadata.shards_metadata)
        if tensor.is_meta and any(device.type != "meta" for _, device in placed):
            raise ValueError(
                "reshard: a tensor on the meta device has no values to move elsewhere: make a new "
                "one, or reshard to placements on 'meta'"
            )
        return metadata, placed

    if isinstance(group, NonMember):
        return *make(), []
    metadata, placed = checks.agree_on(
        make, lambda made: checks.describe(made[0]), "resharding_spec", group
    )
    target = Geometry(metadata, [owner for owner, _ in placed]).tiling
    mine = [(metadata.shards_metadata[i], placed[i][1]) for i in target.of(get_rank())]
    with torch.no_grad():
        tiles = _moved(tensor, target, mine)
    gradient = metadata.tensor_properties.requires_grad
    shards = [
        Shard(tile.to(device).requires_grad_(gradient), shard)
        for tile, (shard, device) in zip(tiles, mine, strict=True)
    ]
    return metadata, placed, shards


def _moved(
    tensor: ShardedTensor, target: Tiling, mine: list[tuple[ShardMetadata, torch.device]]
) -> list[Tensor]:
    if tensor.is_meta:
        sizes = [tuple(shard.shard_sizes) for shard, _ in mine]
        return [torch.empty(size, dtype=tensor.dtype, device="meta") for size in sizes]
    steps = plan(tensor.tiling, target, get_rank())
    return run_plan(steps, tensor.local_tiles(), tensor.process_group, dtype=tensor.dtype)


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
    tiles = [tile.to(device, dtype, non_blocking, copy) for tile in tensor.local_tiles()]
    return tensor._on(tiles, dtype, device and torch.device(device.type), group)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported! (for sharded "
            f"tensors, got {memory_format})"
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
    return tensor._on(tiles, tensor.dtype, torch.device("cuda"), group)


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
