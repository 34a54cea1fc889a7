"""Functions of plain tensors, applied to the local tensors of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.comm.per_call.internal import awaited
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.layout.internal import native_placement
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current

#: The placements of one argument or result; None for a value that is not a tensor.
OnePlacements = Sequence[Placement] | None
_Function = Callable[..., Any]


def local_map(
    func: _Function | None = None,
    out_placements: OnePlacements | tuple[OnePlacements, ...] = None,
    in_placements: Sequence[OnePlacements] | None = None,
    in_grad_placements: Sequence[OnePlacements] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> _Function:
    """A function of plain tensors that takes and returns DTensors.

    ``func`` gets this rank's local tensors, and returns the local tensors of the results. The
    global shapes are found as in ``DTensor.from_local``: calls are collective over the mesh.
    ``func`` may communicate. Without a DTensor among the arguments, ``func`` runs on the arguments
    as they are.

    Gradients: an input that is replicated along an axis where every result is sharded or partial
    gets a partial gradient, which is summed. Otherwise a gradient has the layout of the input. If
    the placements do not decide between the two, pass ``in_grad_placements``.

    Args:
        func: The function. Without it, this is a decorator.
        out_placements: The placements of the result, a list; a tuple of lists for several results,
            None for a result that is not a tensor.
        in_placements: The placements that inputs must have, for each argument (those in lists,
            tuples and dicts counted one by one), None for a value that is not a tensor. None: any.
        in_grad_placements: The placements of the gradients that the function computes, for each
            argument.
        device_mesh: The mesh of the results; None: that of the first DTensor.
        redistribute_inputs: True to redistribute inputs of other placements, instead of an error.

    Raises:
        ValueError: When called: an input has other placements, numbers of placements and of
            arguments or results differ, or DTensors are on different meshes.
        TypeError: Placements are given for a value that is not a tensor, or missing for a tensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, local_map
        >>> from tilework.testing import run_ranks
        >>> @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], None))
        ... def scaled(x, factor):
        ...     assert type(x) is torch.Tensor
        ...     return x * factor
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.arange(3), mesh, [Shard(0)])
        ...     return scaled(x, 10).full_tensor().tolist()
        >>> run_ranks(2, program)
        [[0, 10, 20], [0, 10, 20]]
    """
    if func is None:
        return lambda func: local_map(
            func,
            out_placements,
            in_placements,
            in_grad_placements,
            device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    outs = _each(_own(out_placements))
    in_placements, in_grad_placements = _own(in_placements), _own(in_grad_placements)
    for placements in (*outs, *(in_placements or ()), *(in_grad_placements or ())):
        _check_placements(placements)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DTensor) for value in pytree.tree_leaves(kwargs)):
            raise TypeError(
                "local_map takes DTensors by position: placements are given by position, too"
            )
        values, structure = pytree.tree_flatten(args)
        for value in (*values, *pytree.tree_leaves(kwargs)):
            refuse_torch_dtensor(value, "local_map")
        if not any(isinstance(value, DTensor) for value in values):
            return func(*args, **kwargs)
        mesh = _mesh(values, None if device_mesh is None else mesh_or_current(device_mesh))
        needed = _for_each(in_placements, values, "in_placements")
        inputs = [
            _redistributed(*pair, i, redistribute_inputs)
            for i, pair in enumerate(zip(values, needed, strict=True))
        ]
        grads = _for_each(in_grad_placements, inputs, "in_grad_placements")
        locals_ = [_local(*pair, inputs, outs) for pair in zip(inputs, grads, strict=True)]
        result = func(*pytree.tree_unflatten(locals_, structure), **kwargs)
        results, structure = pytree.tree_flatten(result)
        if len(results) != len(outs):
            raise ValueError(
                f"out_placements are for {len(outs)} results, but {_name(func)} returned "
                f"{len(results)}"
            )
        wrapped = [_wrapped(*pair, mesh, func) for pair in zip(results, outs, strict=True)]
        return pytree.tree_unflatten(wrapped, structure)

    return mapped


def _own(placements: Any) -> Any:
    """The placements as this library's, nested as they were given; torch's are converted."""
    if isinstance(placements, (list, tuple)):
        return type(placements)([_own(each) for each in placements])
    return native_placement(placements)


def _each(out_placements: Any) -> tuple[OnePlacements, ...]:
    """The placements of each result, as a tuple: a list alone is for a single result."""
    if isinstance(out_placements, tuple) and not all(
        isinstance(item, Shard | Replicate | Partial) for item in out_placements
    ):
        return out_placements
    return (out_placements,)


def _check_placements(placements: Any) -> None:
    if placements is None:
        return
    if not isinstance(placements, Sequence) or not all(
        isinstance(item, Shard | Replicate | Partial) for item in placements
    ):
        raise TypeError(
            f"local_map wants for each tensor a sequence of placements, one for each axis of the "
            f"mesh, got {placements!r}"
        )


def _mesh(values: Sequence[Any], mesh: DeviceMesh | None) -> DeviceMesh:
    for value in values:
        if isinstance(value, DTensor):
            mesh = value.device_mesh if mesh is None else mesh
            if value.device_mesh != mesh:
                raise ValueError(
                    f"the tensors of a local_map must be on one mesh, got {mesh} and "
                    f"{value.device_mesh}"
                )
    assert mesh is not None
    return mesh


def _for_each(
    placements: Sequence[OnePlacements] | None, values: Sequence[Any], name: str
) -> Sequence[OnePlacements]:
    if placements is None:
        return [None] * len(values)
    if len(placements) != len(values):
        raise ValueError(
            f"{name} must have an entry for each of the {len(values)} arguments, got "
            f"{len(placements)}"
        )
    for i, (value, its) in enumerate(zip(values, placements, strict=True)):
        if isinstance(value, DTensor) and its is None:
            raise TypeError(f"argument {i} is a DTensor: {name} must give placements, got None")
        if not isinstance(value, Tensor) and its is not None:
            raise TypeError(
                f"argument {i} is a {type(value).__name__}, for which {name} must be None, got "
                f"{list(its)}"
            )
    return placements


def _redistributed(value: Any, needed: OnePlacements, number: int, redistribute: bool) -> Any:
    """The argument in the placements ``needed``; redistributed if allowed, else an error."""
    if needed is None or not isinstance(value, DTensor):
        return value
    spec = value._spec
    if spec == spec_of(spec.mesh, needed, spec.shape, spec.order):
        return value
    if not redistribute:
        raise ValueError(
            f"argument {number} of a local_map has the placements {list(value.placements)}, but "
            f"in_placements are {list(needed)}: redistribute it, or pass redistribute_inputs=True"
        )
    return value.redistribute(placements=needed)


def _local(
    value: Any, grad: OnePlacements, inputs: Sequence[Any], outs: Sequence[OnePlacements]
) -> Any:
    """The local tensor of an input with local gradients in ``grad`` (None: inferred)."""
    if not isinstance(value, DTensor):
        return value
    if grad is None and value.requires_grad and torch.is_grad_enabled():
        grad = _gradient(value, inputs, outs)
    local = value.to_local(grad_placements=grad)
    return awaited(local)


def _gradient(
    value: DTensor, inputs: Sequence[Any], outs: Sequence[OnePlacements]
) -> list[Placement]:
    """The placements of an input's gradient, as they follow from the results' placements."""
    mesh = value.device_mesh
    placements = list(value._spec.dual.placements)
    for axis in range(mesh.ndim):
        if mesh.shape[axis] == 1 or not isinstance(value.placements[axis], Replicate):
            continue
        full = [isinstance(out[axis], Replicate) for out in outs if out is not None]
        others = [
            isinstance(other.placements[axis], Replicate)
            for other in inputs
            if isinstance(other, DTensor)
        ]
        if not any(full):
            placements[axis] = Partial()
        elif not (all(full) and all(others)):
            raise ValueError(
                f"local_map cannot know whether each rank along axis {axis} computes the full "
                f"gradient of an input that is replicated there, or a partial gradient: some "
                f"results are replicated along this axis, and other results or inputs are not. "
                f"Pass in_grad_placements, with Replicate() or Partial() for this axis"
            )
    return placements


def _wrapped(value: Any, placements: OnePlacements, mesh: DeviceMesh, func: _Function) -> Any:
    """A result of the function as a DTensor; as it is if ``placements`` is None."""
    if isinstance(value, DTensor):
        raise TypeError(f"{_name(func)} in a local_map must return plain tensors, got {value!r}")
    if isinstance(value, Tensor) != (placements is not None):
        raise TypeError(
            f"{_name(func)} returned a {type(value).__name__}, for which out_placements say "
            f"{placements!r}: they must be placements for a tensor, and None for anything else"
        )
    return value if placements is None else DTensor.from_local(value, mesh, placements)


def _name(func: _Function) -> str:
    return getattr(func, "__name__", repr(func))
