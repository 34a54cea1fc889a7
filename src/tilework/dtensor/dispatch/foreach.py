"""Operators on lists of tensors, as optimizers call them: ``torch._foreach_*`` and ``_fused_*``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import all_reduce
from tilework.dtensor.autograd import local_graph
from tilework.dtensor.base import is_moved
from tilework.dtensor.dispatch.checked_writes import check_write
from tilework.dtensor.propagation.strides import like_strides
from tilework.dtensor.redistribution.redistribute import axes_group
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Partial, Replicate
from tilework.mesh import DeviceMesh
from tilework.tiled import dtensor_handler, entry_of
from tilework.tiled.rules import accumulation_dtype

# torch's functions that clip gradients then call the operators on lists, which reduce together.
getattr(_foreach_utils, "_foreach_supported_types", []).append(DTensor)

#: The operator of each tensor, where that has another name.
_SINGLE = {
    "norm": torch.linalg.vector_norm,
    "powsum": lambda x, power, **kwargs: x.abs().pow(power).sum(**kwargs),
}
#: Operators whose numbers, here the last argument, are to be named where they take one tensor.
_WITH_VALUE = frozenset({"addcdiv", "addcmul"})
#: Steps of optimizers on lists of parameters, gradients and states.
_FUSED = frozenset(f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd"))


@dtensor_handler(*_FUSED, *(name for name in dir(torch) if name.startswith("_foreach_")))
def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator on lists: on local tensors if layouts match, else one by one."""
    name: str = func.__name__
    lists = [arg for arg in (*args, *kwargs.values()) if _is_list(arg)]
    if name == "_foreach_norm":
        return _norms(*args, **kwargs)
    _check_number(name, args)
    if name.endswith("_"):
        _check_targets(name, lists)
    is_elementwise = name in _FUSED or entry_of(_plain_name(name)).is_elementwise
    layouts = _layouts(lists) if is_elementwise else None
    if _has_graded_numbers(args, kwargs, lists) or _converts(name, lists):
        layouts = None
    if layouts is None or (name not in _FUSED and _writes_views(name, lists[0])):
        return _one_by_one(name, args, kwargs)
    result = func(
        *[_local(arg) for arg in args], **{key: _local(value) for key, value in kwargs.items()}
    )
    if name.endswith("_"):
        _note_written(name, [x for each in lists for x in each] if name in _FUSED else lists[0])
        return None
    return [
        tensor if spec is None else _wrapped_like(tensor, spec)
        for tensor, spec in zip(result, layouts, strict=True)
    ]


def _note_written(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            local_graph.wrote(tensor, name)


def _norms(tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    """The norm of each tensor; those of a mesh are reduced by a single collective. Collective."""
    results: list[Any] = [None] * len(tensors)
    together: dict[DeviceMesh, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.__class__ is DTensor and _has_norm_of_parts(tensor) and float(ord) > 0:
            together.setdefault(tensor._spec.mesh, []).append(at)
        else:
            results[at] = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
    for mesh, places in together.items():
        norms = _norms_on(mesh, [_without_partial(tensors[at]) for at in places], float(ord), dtype)
        kinds = [dtype or tensors[at]._local_tensor.dtype for at in places]
        by_kind = {kind: norms.to(kind.to_real()).unbind() for kind in set(kinds)}
        spec = spec_of(mesh, [Replicate()] * mesh.ndim, ())
        for number, (at, kind) in enumerate(zip(places, kinds, strict=True)):
            results[at] = wrap(by_kind[kind][number], spec)
    return results


def _has_norm_of_parts(tensor: DTensor) -> bool:
    """True if the norm of a tensor is that of the norms of the ranks' parts, without a gradient."""
    spec, local = tensor._spec, tensor._local_tensor
    return (
        bool(spec.sharded_axes)
        and spec.takes_part
        and 0 not in spec.shape
        and (local.is_floating_point() or local.is_complex())
        and not (torch.is_grad_enabled() and tensor.requires_grad)
    )


def _without_partial(tensor: Any) -> DTensor:
    dual, result = tensor._spec.dual, tensor
    if dual is not tensor._spec:
        result = tensor.redistribute(placements=dual.placements, order=dual.order)
    return cast(DTensor, result)


def _norms_on(mesh: DeviceMesh, tensors: Sequence[Any], order: float, dtype: Any) -> Tensor:
    """The norms of tensors on a mesh, as a vector of float64. Collective over axes that shard."""
    specs: list[DTensorSpec] = [tensor._spec for tensor in tensors]
    axes = frozenset().union(*[spec.sharded_axes for spec in specs])
    parts: dict[torch.dtype, list[int]] = {}
    for at, tensor in enumerate(tensors):  # of replicas, the first rank's counts
        is_first = specs[at].is_first(tuple(axes - specs[at].sharded_axes))
        if is_first and tensor._local_tensor.numel():
            parts.setdefault(tensor._local_tensor.dtype, []).append(at)
    norms = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0]._local_tensor.device)
    for kind, places in parts.items():
        locals_ = _local([tensors[at] for at in places])
        found = torch._foreach_norm(locals_, order, accumulation_dtype(dtype or kind))
        norms[places] = torch.stack(found).to(norms.dtype)
    is_max = math.isinf(order)
    # Not every engine's maximum keeps NaN.
    sent = torch.cat([norms, norms.isnan().to(norms.dtype)]) if is_max else norms.pow(order)
    partial = Partial("max" if is_max else "sum")
    placements = [partial if axis in axes else Replicate() for axis in range(mesh.ndim)]
    total = wrap(sent, spec_of(mesh, placements, sent.shape)).full_tensor()
    if not is_max:
        return total.pow(1 / order)
    largest, is_nan = total.chunk(2)
    return torch.where(is_nan > 0, math.nan, largest)


def _wrapped_like(local: Tensor, spec: DTensorSpec) -> DTensor:
    return wrap(local, spec.with_strides(like_strides(spec.shape, spec.strides)))


@dtensor_handler("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients as ``GradScaler`` does; all ranks get ``found_inf``. Collective."""
    grads, found_inf, scale = args
    if any(isinstance(grad, DTensor) and grad._spec.partial_axes for grad in grads):
        raise ValueError("gradients that are partial cannot be unscaled: redistribute them first")
    func(_local(grads), *map(local_graph.plain, (found_inf, scale)), **kwargs)
    _note_written("unscale_", grads)
    meshes = dict.fromkeys(grad.device_mesh for grad in grads if isinstance(grad, DTensor))
    for mesh in meshes:
        if mesh.here:
            group = axes_group(mesh, tuple(range(mesh.ndim)))
            all_reduce(local_graph.plain(found_inf), ReduceOp.MAX, group)


def _check_targets(name: str, lists: Sequence[Sequence[Tensor]]) -> None:
    """Raise before any write if torch would refuse to write to a target (first list)."""
    plain = _plain_name(name)
    for at, target in enumerate(lists[0]):
        others = [its[at] for its in lists[1:] if at < len(its)]
        if target.__class__ is DTensor:
            check_write(plain, target, others)


def _check_number(name: str, args: Sequence[Any]) -> None:
    """Raise, as torch does, if the second argument is a single tensor that is not a number."""
    number = args[1] if len(args) > 1 and name not in _FUSED else None
    if isinstance(number, Tensor) and number.dim():
        raise RuntimeError(
            f"{name} takes as second argument a list of tensors, a number or a tensor without "
            f"dims, got a tensor of shape {list(number.shape)}: pass [tensor] * {len(args[0])} to "
            f"use it for each of the {len(args[0])} tensors"
        )


def _has_graded_numbers(args: Any, kwargs: Any, lists: Sequence[Sequence[Tensor]]) -> bool:
    """True if a tensor that stands for a number gets a gradient: all ranks add to it."""
    if not torch.is_grad_enabled():
        return False
    numbers = [
        *(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)),
        *(x for its in lists[1:] for x in its if x.__class__ is not DTensor),
    ]
    return any(number.requires_grad for number in numbers)


def _converts(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """True if ``_foreach_copy_`` writes values of another dtype: integers take no gradients."""
    return name == "_foreach_copy_" and any(
        target.dtype != value.dtype for target, value in zip(*lists[:2], strict=False)
    )


def _writes_views(name: str, tensors: Sequence[Tensor]) -> bool:
    """True if an operator in place writes to moved views: one by one, since they may overlap."""
    return name.endswith("_") and any(
        tensor.__class__ is DTensor and is_moved(tensor) for tensor in tensors
    )


def _plain_name(name: str) -> str:
    return name.removeprefix("_foreach_").removesuffix("_")


def _is_list(arg: Any) -> bool:
    return arg.__class__ in (list, tuple) and bool(arg) and isinstance(arg[0], Tensor)


def _layouts(lists: Sequence[Sequence[Tensor]]) -> list[DTensorSpec | None] | None:
    """The layout at each place of the lists; None if layouts at a place differ, or lengths."""
    specs: list[DTensorSpec | None] = [
        tensor._spec if tensor.__class__ is DTensor else None for tensor in lists[0]
    ]
    for spec in specs:
        if spec is not None and spec.partial_axes:
            return None
    for others in lists[1:]:
        if len(others) != len(specs):
            return None  # torch raises where it is run
        for spec, tensor in zip(specs, others, strict=True):
            if tensor.__class__ is DTensor:
                other_spec = tensor._spec
                if other_spec is not spec and other_spec != spec:
                    return None
            elif tensor.dim():
                # A plain tensor counts as replicated: whether it is, is checked tensor by tensor.
                return None
    return specs


def _local(arg: Any) -> Any:
    kind = arg.__class__
    if kind is list or kind is tuple:
        return [local_graph.plain(tensor) for tensor in arg]
    if kind is DTensor:  # a number in a tensor, the same for all
        return arg.full_tensor()
    return arg


def _one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not name.startswith("_foreach_"):
        raise NotImplementedError(
            f"{name} needs parameters, gradients and states in the same layouts: use an optimizer "
            f"with fused=False"
        )
    writes = name.endswith("_")
    plain = _plain_name(name)
    operator = _SINGLE.get(plain)
    if operator is None:
        in_place = getattr(Tensor, f"{plain}_", None) if writes else None
        operator = in_place or getattr(torch, plain)
        if writes and in_place is None:  # as maximum, which has none for one tensor
            operator = _then_copied(operator)
    if plain in _WITH_VALUE:
        args, kwargs = _with_value(*args, **kwargs)
    length = len(next(arg for arg in args if _is_list(arg)))
    results = []
    for at in range(length):

        def here(arg: Any, at: int = at) -> Any:
            return arg[at] if arg.__class__ in (list, tuple) and len(arg) == length else arg

        results.append(
            operator(*map(here, args), **{key: here(value) for key, value in kwargs.items()})
        )
    return None if writes else results


def _then_copied(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The in-place form, for one tensor, of an operator that torch has in place only on lists."""

    def write(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return target.copy_(operator(target, *args, **kwargs))

    return write


def _with_value(
    tensors: Any, first: Any, second: Any, value: Any = 1, *, scalars: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of addcdiv and addcmul, with the numbers as the named argument ``value``."""
    values = value if scalars is None else scalars
    if isinstance(values, Tensor):
        values = values.tolist()
    return (tensors, first, second), {"value": values}
