"""Results of operators: made DTensors, written in place, or written to ``out=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilework.dtensor.autograd import gradients
from tilework.dtensor.base import memory_of
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch.checked_writes import check_apart, check_write
from tilework.dtensor.propagation.dtensor_call import (
    Args,
    Kwargs,
    rebuilt,
    replicated_spec,
    tensors_in,
    with_tensors,
)
from tilework.dtensor.provenance.digests import Moved, digest_of, note_write
from tilework.dtensor.random.generator import draw_alike
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.torch_tensors import is_torch_dtensor, refuse_torch_dtensor
from tilework.dtensor.views import moved_views
from tilework.mesh import DeviceMesh


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor as a replicated DTensor."""
    return wrap(tensor, replicated_spec(tensor, mesh))


def wrapped(
    result: Any, outputs: Sequence[DTensorSpec] | None, mesh: DeviceMesh, digest: int
) -> Any:
    """A local result as DTensors of the layouts ``outputs``; without these replicated."""
    if outputs is not None and torch.is_grad_enabled():
        pieces = _wrapped_pieces(result, outputs, digest)
        if pieces is not None:
            return pieces
    tensors = tensors_in(result)
    if not tensors:
        return result
    if outputs is None:
        outputs = [replicated_spec(tensor, mesh) for tensor in tensors]
    if not torch.is_grad_enabled():  # torch's views still say that they require a gradient
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return rebuilt(
        result,
        iter([
            wrap(tensor, spec, hash((digest, number)))
            if tensor.layout is torch.strided
            else tensor
            for number, (tensor, spec) in enumerate(zip(tensors, outputs, strict=True))
        ]),
    )  # fmt: skip


def _wrapped_pieces(result: Any, outputs: Sequence[DTensorSpec], digest: int) -> Any:
    """A list or tuple of local tensors as DTensors; None for any other result."""
    kind = result.__class__
    if not ((kind is tuple or kind is list) and len(result) == len(outputs)):
        return None
    if not all(piece.__class__ is Tensor and piece.layout is torch.strided for piece in result):
        return None
    return kind([
        wrap(piece, spec, hash((digest, number)))
        for number, (piece, spec) in enumerate(zip(result, outputs, strict=True))
    ])  # fmt: skip


def reduced(result: Any, outputs: list[DTensorSpec] | None) -> tuple[Any, list[DTensorSpec] | None]:
    """A local result after partial values were reduced, whose gradients differ. Collective."""
    tensors = tensors_in(result)
    if outputs is None or not (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    ):
        return result, outputs
    locals_ = [redistribute_local(t, s, s.dual) for t, s in zip(tensors, outputs, strict=True)]
    return rebuilt(result, iter(locals_)), [spec.dual for spec in outputs]


def came_from(result: Any, operands: Sequence[Tensor], digest: int) -> Any:
    """Return ``result``. New tensors in it get the call's digest; operands keep their digests."""
    tensors, known = tensors_in(result), set(map(id, operands))
    if len(tensors) == 1 and isinstance(tensors[0], DTensor):
        _own_its_memory(tensors[0], operands)
        if id(tensors[0]) not in known and tensors[0]._viewed is None:
            local = tensors[0]._local_tensor
            tensors[0]._local_tensor = moved_views.as_no_view(local)
    for number, tensor in enumerate(tensors):
        if id(tensor) in known or not isinstance(tensor, DTensor) or tensor._made:
            continue
        if tensor._viewed is None:
            tensor._digest = hash((digest, number))
        else:  # what it shows counts, too
            tensor._made, tensor._digest = hash((digest, number)), None
    return result


def _own_its_memory(tensor: DTensor, operands: Sequence[Tensor]) -> None:
    """Make a view of a temporary tensor no view, as in torch; on all ranks."""
    if tensor._viewed is None:
        return
    memory = memory_of(tensor)
    if not any(isinstance(each, DTensor) and memory_of(each) is memory for each in operands):
        tensor._digest, tensor._made = digest_of(tensor), None
        tensor._viewed = tensor._view_of = tensor._memory = None


def full_value(tensor: Any, name: str) -> Any:
    """A DTensor's full value, refused outside the mesh; others as they are. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not tensor._spec.takes_part:
        refuse_outside(name)
    return DTensor.full_tensor(tensor)


def refuse_outside(name: str) -> NoReturn:
    """Raise on a rank outside of the mesh, for an operator whose result depends on elements."""
    raise RuntimeError(
        f"the result of {name.strip('_')} depends on elements, and this rank is outside the mesh "
        f"that has them: ask mesh.get_coordinate() first, which is None here"
    )


def result_outside(
    name: str, meta_result: Any, outputs: Sequence[DTensorSpec] | None, mesh: DeviceMesh
) -> Any:
    """The result on a rank outside the mesh: DTensors of the right shapes without elements."""
    if meta_result is None:
        refuse_outside(name)
    tensors = tensors_in(meta_result)
    outputs = outputs or [replicated_spec(tensor, mesh) for tensor in tensors]
    return rebuilt(
        meta_result,
        iter([
            wrap(torch.empty(0, dtype=tensor.dtype, device=mesh.device_type), spec)
            for tensor, spec in zip(tensors, outputs, strict=True)
        ]),
    )  # fmt: skip


# -- results that are written ----------------------------------------------------------------


def write(target: DTensor, value: Tensor, spec: DTensorSpec, name: str, digest: int = 0) -> None:
    """Write a local tensor of layout ``spec`` to ``target``; the caller notes the write."""
    if spec.shape != target._spec.shape:
        raise RuntimeError(
            f"{name} changes a tensor of shape {list(target.shape)} in place, but its result has "
            f"shape {list(spec.shape)}: call the form that returns a new tensor"
        )
    moved = redistribute_local(value, spec, target._spec, of=Moved(digest, name))
    target._local_tensor.copy_(moved)


def write_to_plain(name: str, func: Any, draws: bool, /, *args: Any, **kwargs: Any) -> Any:
    """The result of writing DTensors' full values to a plain tensor. Collective."""
    tensors = tensors_in([*args, *kwargs.values()])
    among = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not all(tensor._spec.takes_part for tensor in among):
        return args[0] if args else None
    large = [tensor for tensor in among if tensor.dim()]
    causes.warn_gather(
        name, [x._spec for x in large], [x.dtype for x in large], causes.TO_PLAIN_TENSOR
    )
    full = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    full_args, full_kwargs = with_tensors(args, kwargs, iter(full))
    if draws:
        return draw_alike(among[0].device_mesh, func, *full_args, **full_kwargs)
    return func(*full_args, **full_kwargs)


def call_with_out(name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call with ``out=``: computed, then written there."""
    out = kwargs.pop("out")
    for target in tensors_in(out):
        refuse_torch_dtensor(target, f"{name} with out=")
    result = func(*args, **kwargs)
    if is_torch_dtensor(result):
        result = DTensor.from_torch(result)
    inputs = [x for x in tensors_in([*args, *kwargs.values()]) if isinstance(x, DTensor)]
    _check_outs(name, tensors_in(out), result, inputs)
    if isinstance(out, Tensor):
        write_out(out, result, name)
        return out
    for target, value in zip(out, result, strict=True):
        write_out(target, value, name)
    if name.endswith("_copy"):  # unbind_copy and split_copy, which return nothing
        return None
    kind = getattr(torch.return_types, f"{type(result).__name__}_out", type(out))
    return kind(out)


def _check_outs(name: str, outs: Sequence[Tensor], result: Any, inputs: Sequence[DTensor]) -> None:
    """Raise, as torch does, before a write, if some result cannot be written to ``out=``. Local."""
    values = tensors_in(result)
    if len(outs) != len(values):
        raise TypeError(f"{name} gives {len(values)} tensors, got {len(outs)} in out=")
    for target, value in zip(outs, values, strict=True):
        check_out(name, target, value)
        for tensor in inputs:
            if isinstance(target, DTensor) and tensor is not target:
                one = name in ("max", "min") and len(outs) == 1
                check_apart(name, target, tensor, out=not one)


def check_out(name: str, out: Tensor, value: Tensor) -> None:
    """Raise RuntimeError, as torch does, if a result cannot be written to ``out=``. Local."""
    if torch.is_grad_enabled() and (out.requires_grad or value.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            f"but one of the arguments requires grad"
        )
    grows = not out.numel() and not moved_views.is_view(out) if isinstance(out, DTensor) else True
    if out.dtype != value.dtype or not (out.shape == value.shape or grows):
        raise RuntimeError(
            f"{name} with out= of shape {list(out.shape)} and {out.dtype} for a result of shape "
            f"{list(value.shape)} and {value.dtype}: pass a tensor of the result's dtype, "
            f"and of that shape or without elements, or call {name} without out="
        )


def _copy_to_out(out: Tensor, full: Tensor) -> Tensor:
    """Copy a result to a plain tensor, which takes the result's shape."""
    if out.shape != full.shape:
        out.resize_(full.shape)
    return out.copy_(full)


def write_out(out: Any, value: Any, name: str) -> None:
    """Write a result to the tensor that was passed as ``out=``."""
    if not isinstance(out, DTensor):
        write_to_plain(f"{name} with out=", _copy_to_out, False, out, value)
        return
    if not isinstance(value, DTensor):  # of plain tensors only: it counts as replicated
        value = replicated(value, out._spec.mesh)
    if out.shape != value.shape:
        gradients.set_data(out, value)
        return
    if out._view_of is not None:
        moved_views.check_fresh(out)
    check_write(name, out)
    digest = digest_of(value)
    if causes.watchers:
        causes.begin_operator(name)
    write(out, value._local_tensor, value._spec, name, digest)
    note_write(out, digest)
    moved_views.wrote(out, name)
