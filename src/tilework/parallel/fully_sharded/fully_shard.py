"""fully_shard: data parallelism in which parameters, gradients and optimizer states are sharded.

Each module given to :func:`fully_shard` gathers its parameters before its forward and backward
passes, and frees them after. Gradients are reduce-scattered when the module has all of them.
Between uses, a rank holds only shards. The method is that of S. Rajbhandari et al., *ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020 (stage 3); the interface is
torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import broadcast
from tilework.comm.per_call.internal import lacks_memory
from tilework.comm.world import current_world, get_default_group
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, local_tensor_of, spec_of, wrap
from tilework.layout import Shard
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.mesh.internal import mesh_or_current
from tilework.models import check_is_module
from tilework.parallel.data_parallel.arguments import check_norm
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.fully_sharded.module import install
from tilework.parallel.fully_sharded.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from tilework.parallel.fully_sharded.taking_over import own_modules
from tilework.parallel.fully_sharded.unit import Unit
from tilework.parallel.stale_optimizers import mark_replaced


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    src_data_rank: int | None = None,
) -> Any:
    """A module whose parameters are sharded over a mesh between uses. Collective; blocks.

    Shard the inner modules first, then the outer: each call takes the parameters that no earlier
    call has taken, and gathers them together. Parameters become DTensors, which optimizers,
    clipping and state dicts work on. ``parameters()`` are always these DTensors; within forward an
    attribute (``module.weight``) is the full tensor. All ranks must hold the same values before the
    call: their hashes are compared. Forward and backward are collective over the mesh.

    The modules may change between steps: parameters that were assigned, loaded, tied, cast or
    frozen are noticed in the next forward.

    A rank holds shards of parameters, gradients and optimizer states, and the full parameters of
    the module that computes and of the next module; of small modules up to 512 KiB.

    Args:
        module: The module, or several that are gathered together; changed in place.
        mesh: One axis: shard along it. Two: replicate along the first, shard along the second.
            None: all ranks. Parameters and buffers move to the mesh's kind of device.
        reshard_after_forward: Free full parameters after forward, and gather them again in
            backward; None: True, but for the outermost module. As in torch, 1 is False, and the
            number of ranks that shard is True.
        shard_placement_fn: The dim to shard of a parameter; None, or returning None: the first
            with a row for each rank that shards, or the first if there is none.
        mp_policy: Dtypes of computation and reduction.
        offload_policy: Accepted for modules on the CPU, where there is nothing to offload.
        ignored_params: Parameters to leave as they are.
        dp_mesh_dims: The axes of ``mesh`` that are data parallel, where it is a mesh for all kinds
            of parallelism.
        src_data_rank: The index, among the mesh's ranks, of the rank whose parameters all ranks
            take; None: all ranks hold the same ones.

    Returns:
        The module, whose class is now also an FSDPModule.

    Raises:
        CollectiveMismatchError: A parameter is not the same on all ranks; on every rank.
        NotImplementedError: A parameter has a sparse gradient or needs an extension, or
            ``reshard_after_forward`` is another number of ranks.
        TypeError: An argument is not a module, or is a container without forward.
        ValueError: The module is sharded already, a parameter has no dims or belongs to a module
            that was sharded separately, or the mesh does not fit.

    Example:
        >>> import torch
        >>> from tilework.parallel import fully_shard
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = torch.nn.Linear(4, 4, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     fully_shard(model)
        ...     model(torch.ones(1, 4) * rank).sum().backward()
        ...     return model.weight.to_local().shape, model.weight.grad.full_tensor()[0, 0].item()
        >>> run_ranks(2, program)
        [(torch.Size([2, 4]), 0.5), (torch.Size([2, 4]), 0.5)]
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    mesh = None if mesh is None else mesh_or_current(mesh)
    ignored = list(ignored_params or ())
    if mesh is not None and dp_mesh_dims is not None:
        _leave_axes(modules, mesh, dp_mesh_dims, ignored)
        mesh = _part_of(mesh, dp_mesh_dims)
    _check(modules, mesh, offload_policy)
    mesh = _mesh_of_all_ranks(modules) if mesh is None else mesh
    reshard_after_forward = _frees_after_forward(reshard_after_forward, mesh.shape[-1])
    _move(modules, mesh.device_type, ignored)
    policy = mp_policy or MixedPrecisionPolicy()
    unit = Unit(modules, mesh, policy, reshard_after_forward, shard_placement_fn, ignored)
    if src_data_rank is not None:
        _take_values_of(src_data_rank, unit)
    unit.look()
    for each in modules:
        install(each, unit)
    return module


def _frees_after_forward(given: Any, ranks: int) -> bool | None:
    """The setting that ``reshard_after_forward`` means where ``ranks`` ranks shard. Local."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise TypeError(
            f"reshard_after_forward is True, False, None or a number of ranks, got {given!r}"
        )
    if given < 1 or ranks % given:
        raise ValueError(
            f"reshard_after_forward is {given}, and has to divide the {ranks} ranks that shard"
        )
    if given in (1, ranks):
        return given != 1
    raise NotImplementedError(
        f"reshard_after_forward is {given}: fully_shard frees full parameters or keeps them, and "
        f"cannot shard them over {given} of {ranks} ranks in between. Pass a mesh of two axes, "
        f"({ranks // given}, {given}), to shard over {given} ranks at all times, or True for the "
        f"least memory, or False for the least communication; or use torch's fully_shard with "
        f"torch.distributed.init_process_group('tilework')"
    )


def _part_of(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """The part of a mesh with the data-parallel axes: replicas, if any, then shards."""
    axes = []
    for several in _data_parallel_axes(dims):
        axes.append("_".join(several))
        if len(several) > 1:
            mesh[several].flatten(axes[-1])
    return mesh[tuple(axes)]


def _data_parallel_axes(dims: DataParallelMeshDims) -> list[tuple[str, ...]]:
    """The axes of replicas, if there are any, and the axes of shards."""
    every = filter(None, (dims.replicate, dims.shard))
    return [(names,) if isinstance(names, str) else tuple(names) for names in every]


#: The parameters without data-parallel axes, by the parameters that they replaced: ties stay.
_replaced_by: Any = WeakTensorKeyDictionary()


def _leave_axes(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    dims: DataParallelMeshDims,
    ignored: Iterable[nn.Parameter],
) -> None:
    """Replace DTensor parameters on ``mesh`` by DTensors without the data-parallel axes. Local."""
    own = set(chain(*_data_parallel_axes(dims)))
    known = mesh.mesh_dim_names or ()
    if not own <= set(known):
        raise ValueError(f"dp_mesh_dims names {sorted(own)}, and the mesh has the axes {known}")
    stay = set(map(id, ignored))
    for module in (inner for each in modules for _, inner in own_modules(each, "")):
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or id(parameter) in stay:
                continue
            if layout_of(parameter).mesh != mesh:
                continue
            if parameter not in _replaced_by:
                _replaced_by[parameter] = _without_axes(name, parameter, mesh, own)
                mark_replaced(parameter, module, name, by="fully_shard")
            module._parameters[name] = _replaced_by[parameter]


def _without_axes(name: str, parameter: DTensor, mesh: DeviceMesh, own: set[str]) -> nn.Parameter:
    """A parameter with the same local tensor, on the axes of ``mesh`` that are not in ``own``."""
    rest = dict(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True))
    along_own = [rest.pop(axis) for axis in own]
    if not rest or not all(placement.is_replicate() for placement in along_own):
        raise ValueError(
            f"parameter {name} has the placements {list(parameter.placements)} on {mesh}: before "
            f"fully_shard(), parameters are replicated along the data-parallel axes {sorted(own)}, "
            f"and may be sharded along other axes"
        )
    spec = spec_of(mesh[tuple(rest)], list(rest.values()), parameter.shape)
    local = wrap(local_tensor_of(parameter).detach(), spec)
    return nn.Parameter(local, parameter.requires_grad)


def _take_values_of(source: int, unit: Unit) -> None:
    """Give all ranks the full parameters of the rank ``source``. Collective; blocks."""
    group = unit.owner.mesh.axes_group(range(unit.owner.mesh.ndim))
    if not 0 <= source < group.size():
        raise ValueError(
            f"src_data_rank is {source}: pass the index of one of the mesh's {group.size()} ranks"
        )
    for _, _, parameter in unit.tables.parameters():
        local: Any = parameter
        local = local_tensor_of(local) if isinstance(local, DTensor) else local
        if not lacks_memory(local):
            broadcast(local.detach(), group.global_ranks[source], group)


def _check(
    modules: list[nn.Module], mesh: DeviceMesh | None, offload_policy: OffloadPolicy | None
) -> None:
    for module in modules:
        check_is_module(module, "fully_shard")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise TypeError(
                f"{type(module).__name__} has no forward, before which parameters could be "
                f"gathered: call fully_shard on each module in it"
            )
        if hasattr(module, "_fsdp_state"):
            raise ValueError(
                f"{type(module).__name__} was given to fully_shard before: call fully_shard once "
                f"on each module"
            )
        for name, inner in module.named_modules():
            _check_inner(name, inner)
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one axis (shard) or two (replicate, shard), got {mesh}"
        )
    devices = {p.device.type for module in modules for p in module.parameters()}
    devices |= set() if mesh is None else {mesh.device_type}
    if isinstance(offload_policy, CPUOffloadPolicy) and not devices <= {"cpu", "meta"}:
        raise NotImplementedError(
            f"CPUOffloadPolicy is for modules that compute on the CPU, got parameters and a mesh "
            f"on {sorted(devices)}: pass a module and a mesh on the CPU, or no offload_policy"
        )


def _check_inner(name: str, inner: nn.Module) -> None:
    check_norm(name, inner)
    scales = getattr(inner, "max_norm", None) is not None
    if scales and isinstance(inner, nn.Embedding | nn.EmbeddingBag):
        raise NotImplementedError(
            f"{type(inner).__name__} {name!r} scales the weights that forward uses in place "
            f"(max_norm), which would be lost with the gathered weights: make it without "
            f"max_norm, and scale between steps"
        )
    if isinstance(inner, DistributedDataParallel):
        raise ValueError(
            f"module {name or 'itself'} is a DistributedDataParallel, whose parameters are "
            f"replicas: shard the plain module (ddp.module), on a mesh of two axes to have "
            f"replicas of shards"
        )
    if getattr(inner, "sparse", False) is True:
        raise NotImplementedError(
            f"{type(inner).__name__} {name!r} has sparse gradients, which cannot be reduced to "
            f"shards: make it with sparse=False"
        )


def _move(modules: Iterable[nn.Module], kind: str, ignored: Iterable[nn.Parameter]) -> None:
    """Move plain parameters and buffers of other devices to the mesh's kind of device."""
    stay = set(map(id, ignored))
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            is_elsewhere = tensor.device.type not in (kind, "meta")
            if is_elsewhere and not isinstance(tensor, DTensor) and id(tensor) not in stay:
                tensor.data = tensor.data.to(kind)


@dataclass
class _MeshOfAllRanks:
    """The meshes of all ranks, on which modules are sharded by default; each is made once."""

    #: By the default group and the type of device. All keys have the same group.
    of: dict[tuple[ProcessGroup, str], DeviceMesh] = field(default_factory=dict)

    def forget_groups(self) -> None:
        """Drop the meshes. Called when the default group was replaced."""
        self.of.clear()


def _mesh_of_all_ranks(modules: Iterable[nn.Module]) -> DeviceMesh:
    kinds = [p.device.type for module in modules for p in module.parameters() if not p.is_meta]
    key = get_default_group(), kinds[0] if kinds else "cpu"
    known = current_world().state(_MeshOfAllRanks).of
    if key not in known:
        if any(group is not key[0] for group, _ in known):
            known.clear()
        known[key] = init_device_mesh(key[1], (key[0].size(),))
    return known[key]
