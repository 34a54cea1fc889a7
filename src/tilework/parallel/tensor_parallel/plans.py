"""Modules made tensor-parallel by a plan, which names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from tilework.dtensor import DTensor, distribute_tensor, strict
from tilework.layout import Placement, Replicate
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.models import check_is_module, close_names, matching_names, replace_module
from tilework.parallel.stale_optimizers import marking_replaced
from tilework.parallel.tensor_parallel.axis import MeshAxis
from tilework.parallel.tensor_parallel.styles import ParallelStyle, linear_dims
from tilework.parallel.tensor_parallel.words import named_parameters, style_of


@contextmanager
def loss_parallel() -> Iterator[None]:
    """A context for losses and their ``backward()`` in which operators without a rule raise.

    ``cross_entropy`` and ``nll_loss`` of logits that are sharded in the classes do not gather the
    logits, here or elsewhere: they take a few numbers per element from each rank. Within this
    context an operator that has no rule for a call raises instead of gathering. An operator whose
    rule needs all classes of a row still gathers them. The context is for this rank; open it on
    all ranks.

    Raises:
        NotImplementedError: An operator within has no rule for the call.

    Example::

        with loss_parallel():
            loss = cross_entropy(model(tokens), targets)
            loss.backward()
    """
    with strict():
        yield


#: The attributes of a module that say which hooks it has.
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def shown_layer(module: Any) -> Any:
    """The layer with a weight that ``module`` wraps, or ``module`` itself."""
    if _is_layer(module):
        return module
    weight = getattr(module, "weight", None)
    within = module.modules() if weight is not None else ()
    return next((m for m in within if _is_layer(m) and m.weight is weight), module)


def _is_layer(module: nn.Module) -> bool:
    return linear_dims(module) is not None or isinstance(module, nn.Embedding)


def attach_to_wrapper(
    root: nn.Module, name: str, layer: nn.Module, attach: Callable[[], None]
) -> None:
    """Attach a style to a layer of this name, or to the module that wraps it, now or later. Local.

    The wrapper, such as LoRA's adapters, has the layer's attribute ``weight``. The hooks belong on
    it, so that what it adds is computed with DTensors, too. A layer may be wrapped and unwrapped at
    any time: the module that holds it looks before each forward.
    """
    known = [set(getattr(layer, each)) for each in _HOOKS]
    attach()
    hooks = [
        {key: hook for key, hook in getattr(layer, each).items() if key not in old}
        for each, old in zip(_HOOKS, known, strict=True)
    ]
    first = next(iter(hooks[0]), None)
    if first is None or not _is_layer(layer):
        return

    def place(module: Any) -> None:
        inner = shown_layer(module)
        if not _is_layer(inner) or (first in module._forward_pre_hooks):
            return
        for each, entries in zip(_HOOKS, hooks, strict=True):
            for key in entries:
                getattr(inner, each).pop(key, None)
            getattr(module, each).update(entries)

    place(root.get_submodule(name))
    if name:
        owner, _, last = name.rpartition(".")
        # A deep copy of the owner has the same hook, which looks at the module that calls it.
        root.get_submodule(owner).register_forward_pre_hook(
            lambda caller, _: place(caller._modules[last])
        )


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle | str] | None = None,
    *,
    src_data_rank: int | None = 0,
    axis: str | int = "tp",
) -> nn.Module:
    """Make a module tensor-parallel, in place, as a plan says.

    Collective over the mesh; blocks. A wrong plan raises before anything has changed. Parameters
    that several modules share stay shared.

    On a mesh of one axis, modules and parameters that the plan does not name stay as they are. On a
    mesh of several axes, one axis is the plan's and the others shard the batch: dim 0 of inputs.
    There all parameters and buffers become DTensors, replicated where the plan says nothing, and
    gradients are those of the whole batch. Let such a model compute with DTensors throughout: give
    it a DTensor, and say ``use_local_output=False``. A plain input of a styled module is this
    rank's rows along the other axes. For an operator beside DTensors, as in a module of
    :func:`~tilework.dtensor.distribute_module`, a plain tensor is replicated along all axes.

    Args:
        module: The model, or a submodule.
        device_mesh: The mesh; None: the mesh of the innermost ``with mesh:``.
        parallelize_plan: A style for ``module`` itself, or styles by the names of submodules. In
            each section of a dotted name ``*``, ``?`` and ``[…]`` are wildcards as in file names:
            ``"layers.*.mlp.up"``. The name "" is ``module`` itself. The ``tp_plan`` of a Hugging
            Face model is a plan, too: a style may be a word of it, such as "colwise", and a
            name that of a parameter then.
        src_data_rank: As for :func:`~tilework.dtensor.distribute_tensor`.
        axis: The plan's axis, by name or number, where the mesh has more than one. Styles with
            ``_apply``, as ``ContextParallel``, need none.

    Returns:
        ``module``, or the module that a style with ``_apply`` returned.

    Raises:
        NotImplementedError: A style does not know the class of a module.
        ValueError: Two styles shard a parameter differently; the mesh has no such axis; or a word
            is unknown.
        TypeError: The module is not a module, or the plan not a plan.

    Warns:
        UserWarning: A name of the plan fits no module; the warning lists similar names.

    Example::

        plan = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
        model = parallelize_module(model, mesh, plan)
    """
    mesh = mesh_or_current(device_mesh)
    check_is_module(module, "parallelize_module")
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan changes nothing", stacklevel=2)
        return module
    plan = _checked(parallelize_plan)
    styled = list(_resolved(module, plan))
    matched = {each.pattern for each in styled}
    unmatched = tuple(name for name in plan if name not in matched)
    native = [each for each in styled if not each.style.applies_itself]
    mesh_axis = MeshAxis(mesh, _number(mesh, axis) if native else 0)  # others have their own axis
    parameters = _Parameters()
    for each in native:
        parameters.add(each)
    with marking_replaced(module, by="parallelize_module"):
        parameters.distribute(module, mesh_axis, src_data_rank)
    for each in native:
        layer = f"{each.name or 'the module'} ({type(each.style).__name__})"
        axis_of_layer = replace(mesh_axis, layer=layer, unmatched=unmatched)
        attach_to_wrapper(module, each.name, each.module, partial(_attach, each, axis_of_layer))
    for each in styled:
        if each.style.applies_itself:
            module = _applied(each, module, mesh, src_data_rank)
    return module


def _attach(styled: _StyledModule, axis: MeshAxis) -> None:
    styled.style.attach(styled.module, axis)


def _applied(
    styled: _StyledModule, root: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> nn.Module:
    style: Any = styled.style
    style.src_data_rank = src_data_rank
    made = style._apply(styled.module, mesh)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"{type(style).__name__}._apply must return the module, got {type(made).__name__}"
        )
    if made is styled.module:
        return root
    if styled.module is root:
        return made
    replace_module(root, styled.module, made)
    return root


@dataclass(frozen=True)
class _StyledModule:
    """A module and its style; ``pattern`` is the plan's name for the module."""

    name: str
    module: nn.Module
    style: ParallelStyle
    pattern: str


def _number(mesh: DeviceMesh, axis: str | int) -> int:
    if mesh.ndim == 1:
        return 0
    if isinstance(axis, str) and axis not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the plan needs an axis of {mesh}, axes {mesh.mesh_dim_names or 'without names'}; "
            f"none is named {axis!r}: pass axis=, a name or a number"
        )
    return mesh.spec.axis(axis)


def _refuse_torchs(style: object) -> None:
    name, module = type(style).__name__, type(style).__module__
    if module.startswith("torch.distributed"):
        raise TypeError(
            f"{name} of {module} is a style of torch: tilework's parallelize_module takes the "
            f"styles of tilework.parallel ({name} with the same layouts); torch's "
            f"parallelize_module takes torch's styles, with mesh.to_torch() as the mesh"
        )


def _checked(
    plan: ParallelStyle | Mapping[str, ParallelStyle | str],
) -> Mapping[str, ParallelStyle | str]:
    for style in plan.values() if isinstance(plan, Mapping) else (plan,):
        _refuse_torchs(style)
    if isinstance(plan, ParallelStyle):
        return {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"a plan must be a ParallelStyle, or a dict of styles by names of modules, got "
            f"{type(plan).__name__}"
        )
    for name, style in plan.items():
        if isinstance(name, str) and isinstance(style, str):
            style_of(style, name)
        elif not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"a plan must have styles by names of modules, such as ColwiseParallel(), got "
                f"{name!r}: {style!r}"
            )
    return plan


# -- names -----------------------------------------------------------------------------------


def _resolved(root: nn.Module, plan: Mapping[str, ParallelStyle | str]) -> Iterator[_StyledModule]:
    modules = dict(root.named_modules(remove_duplicate=False))
    for pattern, given in plan.items():
        names = matching_names(pattern, modules)
        if not names and isinstance(given, str):
            found = list(named_parameters(root, pattern, given))
            yield from (_StyledModule(*each, pattern) for each in found)
            if found:
                continue
        if not names:
            _warn_of_unmatched(pattern, modules)
        style = style_of(given) if isinstance(given, str) else given
        seen: set[int] = set()
        for name in names:  # a module may have several names
            if id(modules[name]) not in seen:
                seen.add(id(modules[name]))
                found = modules[name] if style.applies_itself else shown_layer(modules[name])
                yield _StyledModule(name, found, style, pattern)


def _warn_of_unmatched(pattern: str, modules: Mapping[str, nn.Module]) -> None:
    names = [name for name in modules if name]
    near = close_names(pattern, names) or names
    listed = ", ".join(near if len(near) <= 8 else [*near[:8], f"… {len(near) - 8} more"])
    warnings.warn(
        f"{pattern!r} of the plan fits no module, so nothing is parallel by it. There "
        f"{'are' if len(near) > 1 else 'is'}: {listed or 'no submodules at all'}",
        stacklevel=4,
    )


# -- parameters ------------------------------------------------------------------------------


@dataclass
class _Parameters:
    """The layouts of parameters along the axis, all found before any parameter changes."""

    #: By id: the parameter (kept, so that no other gets the id), the layout, the styled module.
    layouts: dict[int, tuple[Tensor, Placement, _StyledModule]] = field(default_factory=dict)

    def add(self, styled: _StyledModule) -> None:
        for name, layout in styled.style.parameter_layouts(styled.module).items():
            parameter = styled.module._parameters.get(name)
            if parameter is None:
                own = ", ".join(name for name, _ in styled.module.named_parameters())
                raise ValueError(
                    f"{styled.name or 'the module'} has no parameter {name!r}, which "
                    f"{_style_text(styled)} shards\nIt has {own or 'none'}. Where {name!r} is "
                    f"computed, by a parametrization or pruning, register that after "
                    f"parallelize_module, or remove it before"
                )
            entry = (parameter, layout, styled)
            _, known, other = self.layouts.setdefault(id(parameter), entry)
            if known != layout:
                raise ValueError(
                    f"{_style_text(other)} wants {known} and {_style_text(styled)} wants {layout} "
                    f"of the same parameter, {name!r} of {styled.name or 'the module'!r}: "
                    f"give the same layout in both"
                )

    def distribute(self, root: nn.Module, axis: MeshAxis, source: int | None) -> None:
        replacements: dict[int, tuple[Tensor, Tensor]] = {}

        def replaced(tensor: Tensor) -> Tensor:
            if id(tensor) not in replacements:
                replacements[id(tensor)] = tensor, self._distributed(tensor, axis, source)
            return replacements[id(tensor)][1]

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
            # A DTensor in this layout stays; with another, distribute_tensor raises.
            distribute_tensor(tensor, axis.mesh, placements, src_data_rank=source)
            return tensor
        distributed: Tensor = distribute_tensor(tensor, axis.mesh, placements, src_data_rank=source)
        if isinstance(tensor, nn.Parameter):
            distributed = nn.Parameter(distributed, requires_grad=tensor.requires_grad)
        return distributed


def _style_text(styled: _StyledModule) -> str:
    return f"{type(styled.style).__name__} (for {styled.pattern!r})"
