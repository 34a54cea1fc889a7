"""Conversion to torch's DTensors and back: the same layout, with the same local tensors.

The order in which several axes shard one dim is torch's ``_StridedShard``; here it is ``order``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilework.comm.per_call.internal import awaited
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.propagation.strides import like_strides
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Placement, Replicate, Shard, chunk_sizes
from tilework.layout.internal import native_placement
from tilework.mesh import DeviceMesh
from tilework.tiled import Handler


def is_torch_dtensor(value: Any) -> bool:
    """True for a DTensor of torch.distributed.tensor."""
    kind: Any = type(value)
    return _is_torchs(kind)


@lru_cache(maxsize=256)
def _is_torchs(kind: type) -> bool:
    return issubclass(kind, Tensor) and any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed")
        for base in kind.__mro__
    )


def refuse_torch_dtensor(value: Any, function: str) -> None:
    """Raise TypeError for a DTensor of torch.distributed.tensor."""
    if is_torch_dtensor(value):
        raise TypeError(
            f"{function} got a DTensor of torch.distributed.tensor: DTensor.from_torch(tensor) "
            f"makes it a tilework DTensor, in the same memory; to_torch() converts back"
        )


def is_of_torch_distributed(func: Any) -> bool:
    """True for a torch.distributed function, or an operator that such a function calls."""
    module: str = getattr(func, "__module__", None) or ""
    namespace: str = getattr(func, "namespace", None) or ""
    return module.startswith("torch.distributed") or namespace in (
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"),
    )


def refuse_of_torch_distributed(func: Any, args: Any, kwargs: Any) -> NoReturn:
    """Raise TypeError for a torch.distributed function that got a DTensor."""
    name = getattr(func, "__name__", str(func))
    raise TypeError(
        f"{name} of torch.distributed got a tilework DTensor: to_torch() makes it one of "
        f"torch.distributed.tensor's, in the same memory, and to_local() gives its local tensor"
    )


def refuse_within_torch(func: Any, handler: Handler) -> Handler:
    """A handler of an operator that raises TypeError if certain torch functions make the call.

    These torch.distributed functions would treat a DTensor as a local tensor: ``from_local`` would
    nest two DTensors, and ``fully_shard`` would cut the full tensor. Other calls go to ``handler``.
    """
    if func not in _BEGINNINGS:
        return handler
    module, name, remedy = _BEGINNINGS[func]

    def checked(func: Any, args: Any, kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "tilework" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith(module):
            raise TypeError(
                f"{name} of torch.distributed got a tilework DTensor: {remedy}, in the same "
                f"memory, and to_local() gives a tensor's local part"
            )
        return handler(func, args, kwargs)

    return checked


#: The first operator that an unchecked torch function calls: module, name and remedy.
_BEGINNINGS: dict[Any, tuple[str, str, str]] = {
    Tensor.view_as: (
        "torch.distributed.tensor._api",
        "DTensor.from_local",
        "to_torch() makes it a DTensor of torch.distributed.tensor",
    ),
    torch.chunk: (
        "torch.distributed.fsdp.",
        "fully_shard",
        "module_to_torch(model) makes a model's torch.distributed.tensor's",
    ),
}


def spec_from_torch(tensor: Any) -> DTensorSpec:
    """The layout of a torch DTensor. Local.

    Raises:
        TypeError: The mesh is on torch's own groups, or this library has no such placement.
        ValueError: The DTensor splits dims as no placement of this library does, or torch's
            DTensors on the mesh have their parts in another order.
    """
    mesh = DeviceMesh.from_torch(tensor.device_mesh)
    _check_ascending(mesh)
    placements = [_native(each, tensor) for each in tensor.placements]
    strided = [
        axis
        for axis, each in enumerate(tensor.placements)
        if type(each).__name__ == "_StridedShard"
    ]
    order = [axis for axis in range(mesh.ndim) if axis not in strided] + strided
    for axis in strided:
        theirs = tensor.placements[axis]
        before = [
            other
            for other in range(axis + 1, mesh.ndim)
            if placements[other] == placements[axis] and other not in strided
        ]
        if math.prod(mesh.shape[other] for other in before) != theirs.split_factor:
            raise ValueError(
                f"torch's DTensor with placements {tensor.placements} on {mesh} splits dim "
                f"{theirs.dim} as no order of the axes does in tilework: redistribute() it first"
            )
    shape = tuple(tensor.shape)
    strides = like_strides(shape, tuple(tensor.stride()))
    spec = spec_of(mesh, placements, shape, order if strided else None, strides)
    if spec.takes_part and tuple(tensor._local_tensor.shape) != tuple(spec.local_shape):
        raise ValueError(
            f"this rank has a part of shape {list(tensor._local_tensor.shape)} of a tensor of "
            f"torch's of shape {list(tensor.shape)}, where {placements} give it "
            f"{list(spec.local_shape)}: torch's DTensor was made of uneven parts"
        )
    return spec


def _check_ascending(mesh: DeviceMesh) -> None:
    """Raise ValueError for a mesh on which torch's DTensors have their parts in another order."""
    axis = mesh.descending_axis
    if axis is not None:
        raise ValueError(
            f"ranks do not ascend along axis {axis} of {mesh}: torch's DTensor cuts a tensor in "
            f"the order of the mesh, but joins its parts in that of their ranks, so its values "
            f"come out in another order. Use a mesh whose ranks ascend along each axis, or "
            f"tilework's DTensors alone, which take any"
        )


def _native(placement: Any, tensor: Any) -> Placement:
    name = type(placement).__name__
    if name == "_StridedShard":
        return Shard(placement.dim)
    if name in ("Shard", "Replicate", "Partial"):
        return native_placement(placement)  # type: ignore[no-any-return]
    is_norm = name == "_NormPartial"
    before = (
        "; or make gradients of both libraries one library's before norms of them are taken, in "
        "the same memory: module_from_torch(model) and DTensor.from_torch(tensor) tilework's, "
        "module_to_torch(model) and to_torch() torch's"
    )
    raise TypeError(
        f"a {'norm of a ' * is_norm}DTensor of torch.distributed.tensor has the placements "
        f"{list(tensor.placements)}, and tilework lacks some of these: redistribute() it to "
        f"torch's Replicate() before it meets tilework DTensors{before * is_norm}"
    )


def local_from_torch(tensor: Any) -> Tensor:
    """The local tensor of a torch DTensor, at the DTensor's place in the graph."""
    return awaited_in_graph(tensor.to_local())


def awaited_in_graph(local: Tensor) -> Tensor:
    """The tensor inside a result of torch's functional collectives, at that place in the graph."""
    if type(local) is Tensor or not hasattr(local, "trigger_wait"):
        return local
    if local.requires_grad and torch.is_grad_enabled():
        return _Awaited.apply(local)  # type: ignore[no-any-return]
    return awaited(local)


class _Awaited(LocalFunction):
    """The identity, from torch's wrapper, which is in the graph, to the wrapped tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return awaited(local).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def torch_from_local(local: Tensor, spec: DTensorSpec, mesh: Any, placements: Sequence[Any]) -> Any:
    """The torch DTensor with this local tensor, at the same place in the graph, on the mesh and
    with the placements that torch has for the layout.

    A write to it by torch counts as a write to the local tensor: moved views made before raise, and
    a backward that needs the overwritten values raises.
    """
    from torch.distributed.tensor import DTensor as TorchDTensor

    if torch.is_inference_mode_enabled() and not local.is_inference():
        with torch.inference_mode(False), torch.no_grad():  # inference tensors count no writes
            return torch_from_local(local, spec, mesh, placements)
    tensor: Any = TorchDTensor.from_local(
        local, mesh, placements, run_check=False, shape=spec.size, stride=spec.strides
    )
    if tensor.requires_grad:
        return _ToTorch.apply(tensor, local.detach())
    return _counted_as(local, tensor)


class _ToTorch(LocalFunction):
    """The identity: the result shares the count of writes, and refuses writes in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, local: Tensor) -> Any:
        return _counted_as(local, tensor).view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


def _counted_as(owner: Tensor, tensor: Any) -> Any:
    """The detached tensor with the write count of ``owner``, which has the same memory."""
    with _Giving(tensor):
        return owner.detach()


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Substitutes a tensor for the result of the first ``detach()``."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensor = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor, self._tensor = self._tensor, None
        if tensor is not None and func is torch.ops.aten.detach.default:
            return tensor
        return func(*args, **(kwargs or {}))


def torch_placements(spec: DTensorSpec) -> list[Any]:
    """The placements of torch for a layout; ValueError if torch has none."""
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate

    _check_ascending(spec.mesh)
    order = spec.order or tuple(range(spec.mesh.ndim))
    found: list[Any] = []
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            found.append(_torch_shard(spec, axis, placement, order))
        elif isinstance(placement, Replicate):
            found.append(TorchReplicate())
        else:
            found.append(TorchPartial(placement.reduce_op))
    return found


def _torch_shard(spec: DTensorSpec, axis: int, placement: Shard, order: Ints) -> Any:
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not _is_chunked(spec, axis, placement):
        raise ValueError(
            f"torch's DTensor splits dims as torch.chunk does, and dim {placement.dim} of a tensor "
            f"with placements {list(spec.placements)} is split otherwise: redistribute() it to "
            f"Shard({placement.dim}) first"
        )
    before = [
        other
        for other in order[: order.index(axis)]
        if other > axis and _shards(spec.placements[other], placement.dim)
    ]
    if not before:
        return TorchShard(placement.dim)
    return _StridedShard(
        placement.dim, split_factor=math.prod(spec.mesh.shape[other] for other in before)
    )


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _is_chunked(spec: DTensorSpec, axis: int, placement: Shard) -> bool:
    if placement.sizes is None:
        return placement.turns == 1
    length = spec.mesh.shape[axis]
    return list(placement.sizes) == chunk_sizes(sum(placement.sizes), length)
