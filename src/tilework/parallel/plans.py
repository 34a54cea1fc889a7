"""From a plan, which names modules, to modules that are parallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from tilework.dtensor import DTensor, distribute_tensor
from tilework.layout import Placement, Replicate
from tilework.mesh import DeviceMesh, current_mesh
from tilework.parallel.axis import MeshAxis
from tilework.parallel.styles import ParallelStyle
from tilework.tiled.module_plan import close_names, matching_names


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    axis: str | int = "tp",
) -> nn.Module:
    """Make a module tensor-parallel, in place, as a plan says.

    Collective over the mesh; blocks. What is wrong with the plan raises before anything changed.
    Parameters that several modules share stay shared.

    On a mesh of one axis, modules and parameters that the plan does not name stay as they are. On a
    mesh of more, one axis is the plan's and the others split the batch: dim 0 of inputs. There all
    parameters and buffers become DTensors, replicated where the plan says nothing, and gradients
    are those of the whole batch. Let such a model compute with DTensors throughout: give it a
    DTensor, and say ``use_local_output=False``.

    Args:
        module: The model, or a part of it.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        parallelize_plan: A style for ``module`` itself, or styles by the names of submodules. In
            each part of a dotted name ``*``, ``?`` and ``[…]`` stand for what they do in file
            names: ``"layers.*.mlp.up"``. The name "" is ``module`` itself.
        src_data_rank: As for :func:`~tilework.dtensor.distribute_tensor`.
        axis: The plan's axis, by name or number, where the mesh has more than one.

    Returns:
        ``module``.

    Raises:
        NotImplementedError: A style does not know the module that it is for.
        ValueError: Two styles cut a parameter differently; or the mesh has no such axis.
        TypeError: The plan is none.

    Warns:
        UserWarning: A name of the plan fits no module; it tells which there are.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
        >>> from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     mlp = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        ...     plan = {
        ...         "0": ColwiseParallel(use_local_output=False),
        ...         "2": RowwiseParallel(use_local_output=False),
        ...     }
        ...     parallelize_module(mlp, mesh, plan)
        ...     x = distribute_tensor(torch.ones(6, 3), mesh, [Shard(0), Replicate()])
        ...     mlp(x).square().mean().backward()
        ...     return mlp(x).placements, mlp[0].weight.grad.placements
        >>> run_ranks(4, program)[0]
        ((Shard(dim=0), Replicate()), (Replicate(), Shard(dim=0)))
    """
    mesh = device_mesh or current_mesh()
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan changes nothing", stacklevel=2)
        return module
    along = MeshAxis(mesh, _number(mesh, axis))
    chosen = list(_resolved(module, _checked(parallelize_plan)))
    parameters = _Parameters()
    for one in chosen:
        parameters.take(one)
    parameters.distribute(module, along, src_data_rank)
    for one in chosen:
        one.style.attach(one.module, along)
    return module


@dataclass(frozen=True)
class _Chosen:
    """A module and its style; ``pattern`` is what named it."""

    name: str
    module: nn.Module
    style: ParallelStyle
    pattern: str


def _number(mesh: DeviceMesh, axis: str | int) -> int:
    if mesh.ndim == 1:
        return 0
    if isinstance(axis, str) and axis not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"of {mesh} with axes {mesh.mesh_dim_names or 'without names'}, which is the plan's? "
            f"There is none named {axis!r}: pass axis=, a name or a number"
        )
    return mesh.spec.axis(axis)


def _checked(plan: ParallelStyle | Mapping[str, ParallelStyle]) -> Mapping[str, ParallelStyle]:
    if isinstance(plan, ParallelStyle):
        return {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"a plan is a ParallelStyle, or a dict of such by names of modules, got "
            f"{type(plan).__name__}"
        )
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"a plan has styles by names of modules, such as ColwiseParallel(), got "
                f"{name!r}: {style!r}"
            )
    return plan


# -- names -----------------------------------------------------------------------------------


def _resolved(root: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[_Chosen]:
    modules = dict(root.named_modules(remove_duplicate=False))
    for pattern, style in plan.items():
        names = matching_names(pattern, modules)
        if not names:
            _warn_of(pattern, modules)
        seen: set[int] = set()
        for name in names:  # a module may have several names
            if id(modules[name]) not in seen:
                seen.add(id(modules[name]))
                yield _Chosen(name, modules[name], style, pattern)


def _warn_of(pattern: str, modules: Mapping[str, nn.Module]) -> None:
    names = [name for name in modules if name]
    near = close_names(pattern, names) or names
    told = ", ".join(near if len(near) <= 8 else [*near[:8], f"… {len(near) - 8} more"])
    warnings.warn(
        f"{pattern!r} of the plan fits no module, so nothing is parallel by it. There "
        f"{'are' if len(near) > 1 else 'is'}: {told or 'no submodules at all'}",
        stacklevel=4,
    )


# -- parameters ------------------------------------------------------------------------------


@dataclass
class _Parameters:
    """How parameters are to lie along the axis: all is known before any changes."""

    #: By id: the parameter (so that no other gets its id), its layout, and who says so.
    layouts: dict[int, tuple[Tensor, Placement, _Chosen]] = field(default_factory=dict)

    def take(self, one: _Chosen) -> None:
        for name, layout in one.style.parameter_layouts(one.module).items():
            parameter = one.module.get_parameter(name)
            known = self.layouts.setdefault(id(parameter), (parameter, layout, one))
            if known[1] != layout:
                raise ValueError(
                    f"{_said(known[2])} wants {known[1]} and {_said(one)} wants {layout} of one "
                    f"parameter, {name!r} of {one.name or 'the module'!r}: let them agree"
                )

    def distribute(self, root: nn.Module, axis: MeshAxis, source: int | None) -> None:
        """Put DTensors into the place of parameters, wherever in ``root`` they are."""
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def replaced(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor, self._distributed(tensor, axis, source)
            return made[id(tensor)][1]

        for module in root.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = replaced(tensor)  # type: ignore[assignment]

    def _distributed(self, tensor: Tensor, axis: MeshAxis, source: int | None) -> Tensor:
        known = self.layouts.get(id(tensor))
        if known is None and (axis.mesh.ndim == 1 or isinstance(tensor, DTensor)):
            return tensor
        layout = Replicate() if known is None else known[1]
        placements = axis.placements(layout, Replicate())
        if isinstance(tensor, DTensor):
            # It stays, if it lies so; distribute_tensor says what is wrong otherwise.
            distribute_tensor(tensor, axis.mesh, placements, src_data_rank=source)
            return tensor
        made: Tensor = distribute_tensor(tensor, axis.mesh, placements, src_data_rank=source)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made


def _said(one: _Chosen) -> str:
    return f"{type(one.style).__name__} (for {one.pattern!r})"
