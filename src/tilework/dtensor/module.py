"""Modules whose parameters and buffers are DTensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import is_torch_dtensor
from tilework.late_names import late_name
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.models import check_is_module

#: Called with a submodule's name, the submodule and the mesh.
PartitionFunction = Callable[[str, nn.Module, DeviceMesh], None]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFunction | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place.

    Collective over the mesh; blocks. All ranks get the values of the mesh's first rank. Tensors
    that ``partition_fn`` leaves plain are replicated; DTensors stay as they are. Tensors that
    several modules share stay shared, unless ``partition_fn`` replaces them. A module on the meta
    device stays there: ``partition_fn`` may make real tensors with
    ``torch.empty_like(dtensor, device=…)``.

    A plain input of the module counts as replicated, along all axes of the mesh, and ranks that
    pass different inputs raise. If each rank has rows of its own, pass a DTensor, or let
    ``input_fn`` make it. (:func:`~tilework.parallel.parallelize_module` is different: a plain
    input there holds rows along all axes but the axis of the plan.)

    Args:
        module: A module of any class.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        partition_fn: Called with name, submodule and mesh for ``module`` (with the name "") and
            each submodule: puts DTensors in the place of parameters.
        input_fn: Called with module, inputs (a tuple) and mesh before each forward of ``module``;
            returns the inputs that forward gets instead.
        output_fn: Called with module, output and mesh after each forward; returns the new output.

    Returns:
        ``module``.

    Raises:
        ValueError: A function takes another number of arguments.
        TypeError: ``module`` is not a module, or is a scripted module; or a function is not
            callable.
        RuntimeError: No mesh is given or active.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.dtensor import Shard, distribute_module, distribute_tensor
        >>> from tilework.dtensor import init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def rows(name, module, mesh):
        ...     if isinstance(module, nn.Linear):
        ...         module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     linear = distribute_module(nn.Linear(3, 4), mesh, rows)
        ...     return linear.weight.to_local().shape, linear.bias.to_local().shape
        >>> run_ranks(2, program)[0]
        (torch.Size([2, 3]), torch.Size([4]))
    """
    mesh = mesh_or_current(device_mesh)
    check_is_module(module, "distribute_module")
    _refuse_scripted(module)
    if partition_fn is not None and not callable(partition_fn):
        raise TypeError(
            f"partition_fn is a function of name, module and mesh, which puts DTensors in the "
            f"place of the module's parameters; got {type(partition_fn).__name__}"
        )
    before = _hook("input_fn", "inputs", input_fn)
    after = _hook("output_fn", "outputs", output_fn)
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    with late_name("dtensor", "marking_replaced")(module, by="distribute_module"):
        for name, submodule in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, submodule, mesh)
            _replicate(submodule, mesh, shared)
    if before is not None:
        module.register_forward_pre_hook(lambda its, inputs: before(its, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda its, _, outputs: after(its, outputs, mesh))
    return module


def _refuse_scripted(module: nn.Module) -> None:
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise TypeError(
                f"distribute_module takes no scripted modules, and "
                f"{repr(name) if name else 'this module'} is a ScriptModule, whose interpreter "
                f"runs torch's operators on plain tensors: distribute the module that was scripted"
            )


def _hook(name: str, what: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The user's hook as a function of module, inputs or outputs, and mesh; None without any."""
    if function is None:
        return None
    if not callable(function):
        raise TypeError(
            f"{name} must be a function of (module, {what}, device_mesh), got {function!r}"
        )
    count = len(inspect.signature(function).parameters)
    if count == 2:
        warnings.warn(
            f"Deprecating {name} that takes two arguments ({what}, device_mesh): let it take "
            f"three, (module, {what}, device_mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _, values, mesh: function(values, mesh)
    if count != 3:
        raise ValueError(
            f"{name} takes three arguments, (module, {what}, device_mesh), but this one takes "
            f"{count}"
        )
    return function


def _replicate(
    module: nn.Module, mesh: DeviceMesh, shared: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Replicate this module's plain tensors, without submodules. ``shared`` has replicas by id."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and not isinstance(parameter, DTensor):
            # By setattr, since a module may override it: nn.LSTM keeps a list of parameters, too.
            setattr(module, name, _replica(parameter, mesh, shared))
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = _replica(buffer, mesh, shared)


def _replica(tensor: Tensor, mesh: DeviceMesh, shared: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    # ``shared`` keeps the tensor alive: no other tensor can get the same id.
    if id(tensor) not in shared:
        replica: Tensor = distribute_tensor(tensor, mesh)
        if isinstance(tensor, nn.Parameter):
            replica = nn.Parameter(replica, requires_grad=tensor.requires_grad)
        shared[id(tensor)] = tensor, replica
    return shared[id(tensor)][1]


def module_to_torch(module: nn.Module) -> nn.Module:
    """Convert a module's DTensors to torch.distributed.tensor's, and return it. In place; local.

    Parameters, buffers and gradients keep their memory. Operators that get DTensors of both
    libraries convert torch's DTensors, with gradients. A module that
    :func:`~tilework.parallel.parallelize_module` has prepared runs as before, while torch's
    ``fully_shard`` and ``torch.distributed.checkpoint`` find parameters that they know.

    The mesh should have come from a torch mesh (:meth:`DeviceMesh.from_torch`), since
    ``fully_shard`` needs a mesh that contains both the axis that it shards along and the axes of
    the DTensors. For a mesh of tilework's own, torch's mesh is made; that is collective
    (:meth:`DeviceMesh.to_torch`).

    Parameters become other objects, without hooks and attributes of the parameters before, and an
    optimizer that was made earlier keeps the old ones. Register hooks, and make optimizers,
    afterwards.

    Raises:
        ValueError: torch has no placements for a parameter; nothing has changed then.

    Example:
        >>> from torch import nn
        >>> module_to_torch(nn.Linear(2, 3))  # has no DTensors
        Linear(in_features=2, out_features=3, bias=True)
    """
    check_is_module(module, "module_to_torch")
    with late_name("dtensor", "marking_replaced")(module, by="module_to_torch"):
        return _converted(module, DTensor, DTensor.to_torch)


def module_from_torch(module: nn.Module) -> nn.Module:
    """Convert a module's torch DTensors to this library's DTensors; return it. In place; local.

    Parameters become new tensors: make optimizers, hooks and attributes of parameters afterwards.

    Raises:
        TypeError: A parameter's groups are on torch's own backends, or torch's ``fully_shard``
            has sharded a module, and holds the parameters. Nothing has changed then.
        ValueError: This library has no placements for a parameter's layout. Nothing has changed.

    Example:
        >>> from torch import nn
        >>> module_from_torch(nn.Linear(2, 3))
        Linear(in_features=2, out_features=3, bias=True)
    """
    for name, part in module.named_modules():
        if any(
            base.__name__ == "FSDPModule" and base.__module__.startswith("torch.distributed")
            for base in type(part).__mro__
        ):
            where = f"the module {name!r}" if name else "the module"
            raise TypeError(
                f"torch's fully_shard has sharded {where}, and gathers its own parameters in each "
                f"forward: call module_from_torch() before it, and tilework.parallel's fully_shard "
                f"after; or keep such a module, whose DTensors operators convert"
            )

    check_is_module(module, "module_from_torch")
    with late_name("dtensor", "marking_replaced")(module, by="module_from_torch"):
        return _converted(module, is_torch_dtensor, DTensor.from_torch)


def _converted(module: nn.Module, kind: Any, convert: Callable[[Any], Tensor]) -> nn.Module:
    """The module with tensors of a kind converted; a shared tensor stays shared."""

    def wanted(tensor: Any) -> bool:
        return isinstance(tensor, kind) if isinstance(kind, type) else bool(kind(tensor))

    known: dict[int, Tensor] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if wanted(tensor):
            known[id(tensor)] = _converted_tensor(tensor, convert)
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            of_part: dict[str, Any] = tensors
            of_part.update({n: known[id(t)] for n, t in of_part.items() if id(t) in known})
    return module


def _converted_tensor(tensor: Tensor, convert: Callable[[Any], Tensor]) -> Tensor:
    converted = convert(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        converted = nn.Parameter(converted, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        converted.grad = convert(tensor.grad)
    return converted
