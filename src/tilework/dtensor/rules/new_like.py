"""Creation of tensors like others. No values are read, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.dispatch.results import check_out, replicated, write_out
from tilework.dtensor.propagation.dtensor_call import replicated_spec, tensors_in
from tilework.dtensor.propagation.strides import like_strides
from tilework.dtensor.random.generator import fill_local, next_key
from tilework.dtensor.random.philox import Distribution, Integers, Normal, Uniform
from tilework.dtensor.spec import DTensorSpec, row_major
from tilework.dtensor.tensor import DTensor, wrap
from tilework.mesh.internal import check_device_is_there
from tilework.tiled import dtensor_handler


def _check_device(func: Any, tensor: DTensor, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if a new tensor's device does not exist here."""
    device = kwargs.get("device")
    if isinstance(device, (str, torch.device)):
        what = f"{func.__name__} of a DTensor on {tensor.device_mesh}"
        check_device_is_there(torch.device(device).type, what)


@dtensor_handler("zeros_like", "ones_like", "empty_like", "full_like")
def _like(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``empty_like`` and so on, in the input's layout with Replicate in place of Partial."""
    tensor, *others = _first(args, kwargs, "input")
    _check_device(func, tensor, kwargs)
    spec = _like_spec(tensor, kwargs)
    return _wrapped(func, func(tensor._local_tensor, *others, **kwargs), spec)


def _wrapped(func: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of the local tensor that ``func`` made. Uninitialised replicas become 0."""
    if spec.is_replicated and "empty" in func.__name__:
        # Replicas are equal on all ranks, which compare them; memory that nobody wrote differs.
        local.detach().zero_()
    return wrap(local, spec)


def _like_spec(tensor: DTensor, kwargs: dict[str, Any]) -> DTensorSpec:
    """The layout of a tensor like another, with the strides that torch gives the new tensor."""
    spec = tensor._spec.dual
    if spec.strides == row_major(spec.shape) and "memory_format" not in kwargs:
        return spec
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    return spec.with_strides(like_strides(spec.shape, spec.strides, memory_format))


def _first(args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Sequence[Any]:
    """The positional arguments, with the tensor first also if it was passed by keyword."""
    return args if args else (kwargs.pop(name),)


@dtensor_handler("rand_like", "randn_like", "randint_like")
def _drawn_like(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor, *bounds = _first(args, kwargs, "input")
    _check_device(func, tensor, kwargs)
    generator = kwargs.pop("generator", None)
    distribution: Distribution = Uniform() if func is torch.rand_like else Normal()
    if func is torch.randint_like:
        low, high = kwargs.pop("low", 0), kwargs.pop("high", None)
        limits = [*bounds, *([] if high is None else [high])]
        distribution = Integers(*map(int, [low, *limits] if len(limits) == 1 else limits))
    requires_grad = kwargs.pop("requires_grad", False)
    spec = _like_spec(tensor, kwargs)
    local = torch.empty_like(tensor._local_tensor, **kwargs)
    fill_local(local, next_key(spec.mesh, generator), distribution, spec)
    return wrap(local.requires_grad_(requires_grad), spec)


@dtensor_handler("new_zeros", "new_ones", "new_empty", "new_full")
def _new(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``new_zeros`` and so on, in the input's layout if shapes are equal, else replicated."""
    tensor, *others = args
    _check_device(func, tensor, kwargs)
    size = kwargs.pop("size", None)
    if size is None:
        given_one_by_one = func is not Tensor.new_full and not isinstance(others[0], Sequence)
        size, others = (others, []) if given_one_by_one else (others[0], others[1:])
    spec, size = tensor._spec.dual, tuple(map(index, size))
    if size != spec.shape:
        local = func(tensor._local_tensor, size, *others, **kwargs)
        return _wrapped(func, local, replicated_spec(local, spec.mesh))
    spec = spec.with_strides(row_major(spec.shape))
    return _wrapped(func, func(tensor._local_tensor, spec.local_shape, *others, **kwargs), spec)


@dtensor_handler("new_tensor", "new_empty_strided")
def _new_replicated(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor, *others = args
    _check_device(func, tensor, kwargs)
    result = func(tensor._local_tensor, *others, **kwargs)
    if isinstance(result, DTensor):
        return result
    return _wrapped(func, result, replicated_spec(result, tensor._spec.mesh))


@dtensor_handler("new")
def _new_of_any(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.new`` of sizes, values, or a tensor that shares its memory."""
    tensor, *others = args
    if len(others) == 1 and isinstance(others[0], DTensor):
        return others[0].detach()
    sizes: Any = kwargs.pop("size", others)
    if len(sizes) == 1 and isinstance(sizes[0], torch.Size):
        sizes = sizes[0]
    if not isinstance(tensor, DTensor) or not all(isinstance(size, int) for size in sizes):
        return _new_replicated(func, args, kwargs)
    empty = not (sizes or isinstance(sizes, torch.Size))
    return tensor.new_empty((0,) if empty else tuple(sizes), **kwargs)


@dtensor_handler("zeros", "ones", "full", "eye", "arange", "linspace", "logspace")
def _made_anew(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a creation function, such as ``torch.full``, with a DTensor as a number or as ``out``."""
    out = kwargs.pop("out", None)
    if out is not None:
        kwargs["dtype"] = kwargs.get("dtype") or out.dtype
    values = tensors_in([out, args, kwargs])
    mesh = next(value.device_mesh for value in values if isinstance(value, DTensor))
    result = func(
        *map(_full_value, args), **{name: _full_value(value) for name, value in kwargs.items()}
    )
    if out is None:
        return replicated(result, mesh)
    value = replicated(result, mesh)
    check_out(func.__name__, out, value)
    write_out(out, value, func.__name__)
    return out


def _full_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_full_value, value))
    return value.full_tensor() if isinstance(value, DTensor) else value
