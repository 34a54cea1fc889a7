"""A sharded tensor in another dtype, or on other devices of the same ranks."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch

from tilework.comm.world import AnyGroup, resolve
from tilework.mesh.internal import check_device_is_there
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.graph import graph_tiles
from tilework.sharded.wrap import wrap_results

BaseT = TypeVar("BaseT", bound=ShardedTensorBase)


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
