"""Modules whose parameters and buffers are DTensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.tensor import DTensor
from tilework.mesh import DeviceMesh, current_mesh

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

    Collective over the mesh; blocks. Values are those of the mesh's first rank. Tensors that
    ``partition_fn`` leaves plain are replicated; DTensors stay. Tensors that
    several modules share stay shared, where ``partition_fn`` leaves them. A module on the meta
    device stays there: ``partition_fn`` may make its tensors with
    ``torch.empty_like(dtensor, device=…)``.

    Args:
        module: Any; its class does not matter.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        partition_fn: Called with name, submodule and mesh for each submodule, itself included (its
            name is ""): puts DTensors in the place of parameters.
        input_fn: Called with module, inputs (a tuple) and mesh before each forward of ``module``;
            returns what it gets instead.
        output_fn: Likewise with module, output and mesh, after.

    Returns:
        ``module``.

    Raises:
        ValueError: A function takes another number of arguments.
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
    mesh = device_mesh or current_mesh()
    before = _hook("input_fn", "inputs", input_fn)
    after = _hook("output_fn", "outputs", output_fn)
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate(submodule, mesh, shared)
    if before is not None:
        module.register_forward_pre_hook(lambda its, inputs: before(its, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda its, _, outputs: after(its, outputs, mesh))
    return module


def _hook(name: str, what: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A function of module, inputs or outputs, and mesh."""
    if function is None:
        return None
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
    """Replicate the plain tensors of this very module. ``shared`` has replicas by their id."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and not isinstance(parameter, DTensor):
            # Not behind the module's back: nn.LSTM keeps a list of its parameters, too.
            setattr(module, name, _replica(parameter, mesh, shared))
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = _replica(buffer, mesh, shared)


def _replica(tensor: Tensor, mesh: DeviceMesh, shared: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    # The tensor is kept there too, so that no other gets its id.
    if id(tensor) not in shared:
        replica: Tensor = distribute_tensor(tensor, mesh)
        if isinstance(tensor, nn.Parameter):
            replica = nn.Parameter(replica, requires_grad=tensor.requires_grad)
        shared[id(tensor)] = tensor, replica
    return shared[id(tensor)][1]
