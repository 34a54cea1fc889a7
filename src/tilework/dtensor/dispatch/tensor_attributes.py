"""Functions that are not operators: attributes of a tensor, and the place in the graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn import Parameter

from tilework.dtensor.autograd import gradients, local_graph
from tilework.dtensor.base import DTensorBase, base_in_graph, is_moved, own_memory
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import offset_of
from tilework.dtensor.views.places import count_write, leave_graph_of_wrappers
from tilework.tiled import dtensor_handler, is_called_within


def _answer(names: str, read: Callable[..., Any]) -> None:
    """Let ``read``, called with a call's arguments, answer for functions of these names."""
    dtensor_handler(*names.split())(lambda func, args, kwargs: read(*args, **kwargs))


def _of_dim(facts: Any, dim: int | None) -> Any:
    return facts if dim is None else facts[dim]


_answer("size", lambda tensor, dim=None: _of_dim(tensor._spec.size, dim))
_answer("stride", lambda tensor, dim=None: _of_dim(tensor._spec.strides, dim))
_answer("dim ndimension", DTensor.dim)
_answer("numel nelement", lambda tensor: math.prod(tensor._spec.shape))
_answer("__hash__", id)
_answer("__repr__", repr)
_answer("storage_offset", offset_of)
_answer("is_contiguous", lambda tensor, *form, **named: tensor._spec.is_contiguous(*form, **named))
_answer("is_same_size", lambda tensor, other: bool(tensor.shape == other.shape))
_answer("register_hook", DTensor.register_hook)
_answer("requires_grad_", DTensor.requires_grad_)
_answer("grad", gradients.autograd_grad)


@dtensor_handler("__len__")
def _len(func: Any, args: Any, kwargs: Any) -> int:
    (tensor,) = args
    if not tensor._spec.shape:
        raise TypeError("len() of a 0-d tensor")
    return int(tensor._spec.shape[0])


@dtensor_handler(
    *("is_floating_point", "is_complex", "is_signed", "element_size", "get_device"),
    *("is_conj", "is_neg", "is_pinned", "is_shared"),
    *("_is_view", "_is_zerotensor", "is_distributed", "is_coalesced"),
    *("dense_dim", "sparse_dim", "_nnz", "is_sparse", "q_scale", "qscheme"),
)
def _of_local(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*[local_graph.plain(arg) for arg in args], **kwargs)


@dtensor_handler("_base.__get__")
def _base(func: Any, args: Any, kwargs: Any) -> DTensor | None:
    """The tensor whose memory a view shows, also through other views; None if it is no view."""
    (tensor,) = args
    if not moved_views.is_view(tensor):
        return None
    while (base := base_in_graph(tensor)) is not None:
        tensor = base
    return tensor  # type: ignore[no-any-return]


@dtensor_handler("is_inference")
def _is_inference(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a tensor was made in inference mode; for a moved view, if the base was."""
    (tensor,) = args
    while (shown := own_memory(tensor).shows) is not None:
        tensor = shown.base
    return bool(func(local_graph.plain(tensor)))


@dtensor_handler("_has_compatible_shallow_copy_type")
def _may_be_data(func: Any, args: Any, kwargs: Any) -> bool:
    """True if ``tensor.data = other`` is possible: what ``nn.Module.to`` asks of each parameter."""
    if not all(isinstance(arg, DTensor) for arg in args):
        return False
    return bool(func(*map(local_graph.plain, args)))


@dtensor_handler("is_set_to")
def _is_set_to(func: Any, args: Any, kwargs: Any) -> bool:
    """True if both show the same memory in the same layout."""
    tensor, other = args
    if not (isinstance(tensor, DTensor) and isinstance(other, DTensor)):
        return False
    return tensor._spec == other._spec and bool(func(*map(local_graph.plain, args)))


@dtensor_handler("result_type")
def _result_type(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """The dtype of ``torch.result_type``, which depends only on dtypes and numbers of dims."""
    values = [*args, *kwargs.values()]
    result: torch.dtype = func(*[
        torch.empty((1,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value
        for value in values
    ])  # fmt: skip
    return result


@dtensor_handler("detach", is_view=True)
def _detach(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor: DTensor = args[0]
    if tensor._view_of is not None:
        moved_views.check_fresh(tensor)
    if is_moved(tensor):
        return moved_views.same_memory(tensor, tensor._local_tensor.detach(), Tensor.detach)
    result = wrap(tensor._local_tensor.detach(), tensor._spec)
    moved_views.note_viewed(result, tensor, Tensor.detach)
    if not tensor._spec.is_replicated:  # else the contents show writes
        result._made = digest_of(tensor)
    return result


@dtensor_handler("detach_")
def _detach_(func: Any, args: Any, kwargs: Any) -> DTensor:
    (tensor,) = args
    if torch.is_inference_mode_enabled():  # which knows of no graph
        return tensor  # type: ignore[no-any-return]
    if moved_views.is_view(tensor):
        raise RuntimeError(
            "detach_() of a view, which would have to be cut off its base's graph too: use detach()"
        )
    if tensor._view_of is not None:
        moved_views.check_fresh(tensor)
    local = tensor._local_tensor
    # The local tensor may be a view even if the tensor is not.
    tensor._local_tensor = local.detach() if local._is_view() else local.detach_()
    tensor._made_without_grad = False
    leave_graph_of_wrappers(tensor)
    local_graph.mirror_requires_grad(tensor)
    return tensor  # type: ignore[no-any-return]


@dtensor_handler("backward")
def _backward(func: Any, args: Any, kwargs: Any) -> None:
    if func is torch.autograd.backward:
        gradients.autograd_backward(*args, **kwargs)
    else:
        DTensor.backward(*args, **kwargs)


@dtensor_handler("__format__")
def _format(func: Any, args: Any, kwargs: Any) -> str:
    """As in torch: a tensor without dims gives the number, as in ``f"expert_{i}"``; else repr()."""
    tensor, spec = args
    if tensor.dim() and spec:
        raise TypeError(f"the format {spec!r} is for one number, got {tensor!r}: format elements")
    is_number = not (tensor.dim() or tensor.is_meta) and (spec or not isinstance(tensor, Parameter))
    return format(tensor.item(), spec) if is_number else repr(tensor)


@dtensor_handler(
    *("data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"),
    *("_make_dual", "make_dual", "share_memory_"),
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"),
    *("resize_", "resize_as_", "_resize_output_"),
)
def _no_memory(func: Any, args: Any, kwargs: Any) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensorBase))
    if name.endswith("make_dual"):
        raise TypeError(
            f"forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) take no "
            f"DTensors, got {tensor!r}: use backward(), or plain tensors from full_tensor()"
        )
    if is_called_within("export"):
        raise TypeError(
            f"torch.export and torch.jit take no DTensors, got {tensor!r}: export a plain copy of "
            f"the model, whose parameters are those of full_tensor()"
        )
    raise TypeError(
        f"{name} asks for the memory of {tensor!r}, which has its elements on several ranks: make "
        f"it plain with full_tensor(), or take this rank's part with to_local(); index, narrow(), "
        f"unfold() and expand() show parts of it, and x.data = y gives it another shape; "
        f"tilework.checkpoint.save and async_save take it as it is; for other uses convert it "
        f"to torch's, in the same memory, with to_torch(), or a model by module_to_torch(model)"
    )


def _asking_for_memory(original: Any) -> Any:
    """``to_dlpack`` that refuses DTensors; torch's asks no ``__torch_function__``."""

    @functools.wraps(original)
    def to_dlpack(tensor: Any) -> Any:
        if isinstance(tensor, DTensorBase):
            _no_memory(original, (tensor,), {})
        return original(tensor)

    return to_dlpack


_place: Any
for _place in (torch, torch.utils.dlpack):
    _place.to_dlpack = _asking_for_memory(_place.to_dlpack)


def _taking_dtensors(original: Any) -> Any:
    """``torch.asarray`` that takes DTensors; torch's asks no ``__torch_function__``."""

    @functools.wraps(original)
    def asarray(
        obj: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        copy: bool | None = None,
        requires_grad: bool = False,
    ) -> Any:
        if not isinstance(obj, DTensorBase):
            named = {"dtype": dtype, "device": device, "copy": copy}
            return original(obj, **named, requires_grad=requires_grad)
        result: Any = obj.to(device=device or obj.device, dtype=dtype or obj.dtype)
        if copy is False and result is not obj:
            raise ValueError(
                f"asarray(copy=False) of a DTensor of {obj.dtype} on {obj.device}: it has to be "
                f"copied to be of {result.dtype} on {result.device}"
            )
        if copy and result is obj:
            result = obj.clone()
        if not requires_grad and not result.is_leaf:
            return result.detach()
        return result.requires_grad_(requires_grad)

    return asarray


torch.asarray = _taking_dtensors(torch.asarray)


def _counting_writes(original: Any) -> Any:
    """A replacement of ``increment_version`` that also counts a write to the local tensor."""

    @functools.wraps(original)
    def increment_version(tensor: Any) -> None:
        for each in (tensor,) if isinstance(tensor, Tensor) else tensor:
            original(each)
            if isinstance(each, DTensorBase):
                count_write(each, graded=False)
                if not each._local_tensor.is_inference():
                    original(each._local_tensor)

    return increment_version


_graph: Any = torch.autograd.graph
_graph.increment_version = _counting_writes(_graph.increment_version)


# -- properties that are operators -----------------------------------------------------------


def _matrix_transposed(x: Tensor, name: str) -> Tensor:
    if x.dim() == 1:
        raise RuntimeError(
            f"tensor.{name} is only supported on matrices or batches of matrices. Got 1-D tensor."
        )
    return x if x.dim() == 0 else x.transpose(-2, -1)


def _adjoint(x: Tensor) -> Tensor:
    if x.dim() not in (0, 2):
        raise RuntimeError(
            f"tensor.H is only supported on matrices (2-D tensors). Got {x.dim()}-D tensor."
        )
    return x.transpose(0, 1).conj() if x.dim() else x.conj()


_answer("T.__get__", lambda x: x.permute(tuple(range(x.dim()))[::-1]))
_answer("mT.__get__", lambda x: _matrix_transposed(x, "mT"))
_answer("H.__get__", _adjoint)
_answer("mH.__get__", lambda x: _matrix_transposed(x, "mH").conj())
_answer("nbytes.__get__", lambda x: x.numel() * x.element_size())
