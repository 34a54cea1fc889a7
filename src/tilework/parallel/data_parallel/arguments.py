"""The arguments of DistributedDataParallel, checked and resolved, and casts to dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import AnyGroup, NonMember, resolve
from tilework.dtensor.internal import is_torch_dtensor
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.models import check_is_module
from tilework.parallel.data_parallel.leaves import shared_ranks
from tilework.parallel.data_parallel.outputs import replace_tensors

_requires_grad = attrgetter("requires_grad")


def check_module(module: Any, wrapper: type[nn.Module]) -> None:
    """Raise unless a module can be wrapped in DistributedDataParallel. Local."""
    check_is_module(module, "DistributedDataParallel")
    for name, inner in module.named_modules():
        if isinstance(inner, wrapper):
            where = f"its module {name!r}" if name else "the module"
            raise RuntimeError(
                f"{where} is a DistributedDataParallel already: gradients would be averaged twice; "
                f"wrap the plain module (ddp.module) once"
            )
        check_norm(name, inner)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_torch_dtensor(tensor) and name not in ignored:
            raise TypeError(
                f"{name} is a DTensor of torch.distributed.tensor: call module_from_torch(module) "
                f"first, which makes all of them DTensors of tilework, in the same memory"
            )
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"DistributedDataParallel needs parameters with shapes, and {', '.join(lazy[:3])} have "
            f"none yet: run the lazy module once on an input first"
        )
    if not any(map(_requires_grad, module.parameters())):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that "
            "require a gradient."
        )


def check_norm(name: str, inner: nn.Module) -> None:
    """Raise TypeError for torch's SyncBatchNorm, unless torch has groups for it. Local."""
    has_groups = torch.distributed.is_available() and torch.distributed.is_initialized()
    if isinstance(inner, nn.SyncBatchNorm) and not has_groups:
        raise TypeError(
            f"{name or 'the module'} is torch's SyncBatchNorm, which knows the groups of "
            f"torch.distributed alone: no rank would see the rows of others. Call "
            f"tilework.parallel.SyncBatchNorm.convert_sync_batchnorm(model), which takes torch's "
            f"layers as well"
        )


def check_layouts(parameters: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup) -> None:
    """Raise ValueError if a parameter is distributed over the group's ranks. Local."""
    for name, parameter in parameters:
        if others := shared_ranks(parameter, group):
            raise ValueError(
                f"{name}, a {type(parameter).__name__}, lies on ranks of the group that averages "
                f"gradients ({others}), so these hold no replicas of it. Use a mesh with an axis "
                f"for each: parallelize_module(module, mesh['tp']), then "
                f"DistributedDataParallel(module, device_mesh=mesh['dp'])"
            )


def group_of(group: AnyGroup, mesh: DeviceMesh | None) -> ProcessGroup:
    """The group that averages gradients, checked; the default group for None. Local."""
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None:
        mesh = mesh_or_current(mesh)
        if mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
        return mesh.get_group(0)
    group = resolve(group)
    if isinstance(group, NonMember):
        raise ValueError(
            f"this rank is not in the group of ranks {list(group.global_ranks)}, and cannot hold a "
            f"replica: construct DistributedDataParallel on the group's ranks only"
        )
    return group


def devices_of(
    parameters: Iterable[nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[torch.device] | None, torch.device | None]:
    """The device of inputs, as a list, and of outputs; both None if none is given."""
    if not device_ids and output_device is None:
        return None, None
    devices = {parameter.device for parameter in parameters}
    kinds = {device.type for device in devices}
    if len(device_ids or ()) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, but got {device_ids}"
        )
    if kinds <= {"cpu", "meta"} or len(devices) > 1:
        raise ValueError(
            f"DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device modules on an accelerator, but got device_ids {device_ids}, "
            f"output_device {output_device}, and module parameters {devices}: pass None"
        )
    (kind,) = kinds
    first = device_ids[0] if device_ids else output_device
    assert first is not None
    device = torch.device(kind, first) if isinstance(first, int) else torch.device(first)
    return [device], device


def sends_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """True if forward begins with the first rank's buffers; two names that differ raise."""
    given = {bool(each) for each in (broadcast_buffers, forward_sync_buffers) if each is not None}
    if len(given) > 1:
        raise ValueError(
            f"broadcast_buffers={broadcast_buffers} and forward_sync_buffers="
            f"{forward_sync_buffers} are one setting: give one of them"
        )
    return given != {False}


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a step of DistributedDataParallel.

    Attributes:
        param_dtype: The dtype of forward and backward; the parameters themselves keep their own.
            None: forward and backward use the parameters' dtype.
        reduce_dtype: The dtype of averages of gradients; None: the parameters' own dtype.
        buffer_dtype: The dtype of floating-point buffers, which are cast once, at construction;
            None: buffers are not cast.
        cast_forward_inputs: Floating-point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> MixedPrecision:
        """Refuse the settings of torch's FSDP1, whose class has the same name."""
        theirs = sorted(_OF_FSDP1.intersection(kwargs))
        if theirs:
            raise TypeError(
                f"tilework.parallel.MixedPrecision is DistributedDataParallel's, and has no "
                f"{', '.join(theirs)}, which torch.distributed.fsdp.MixedPrecision has: "
                f"fully_shard takes mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)"
            )
        return super().__new__(cls)


_OF_FSDP1 = {"keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore"}


def checked_precision(given: Any) -> MixedPrecision | None:
    """DistributedDataParallel's argument ``mixed_precision``, after a check of the type."""
    if given is None or isinstance(given, MixedPrecision):
        return given
    kind = type(given)
    raise TypeError(
        f"DistributedDataParallel takes tilework.parallel.MixedPrecision, got {kind.__name__} of "
        f"{kind.__module__}; MixedPrecisionPolicy is for fully_shard"
    )


def moved(value: Any, device: torch.device) -> Any:
    """A copy of a value with all tensors on a device."""
    return replace_tensors(value, lambda tensor: tensor.to(device))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a value with all floating-point tensors in a dtype."""
    return replace_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
