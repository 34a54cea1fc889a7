"""The plain tensors behind a module's parameters: the leaves that gradients accumulate into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.contract import ProcessGroup
from tilework.tiled import TiledTensor


@dataclass(frozen=True, eq=False)
class GradLeaf:
    """A tensor that receives a gradient: a parameter, or a local tensor of a parameter."""

    name: str
    module: str
    tensor: Tensor
    sparse: bool = False

    def on_grad(self, call: Callable[[Tensor], None]) -> Any:
        """Run ``call`` whenever backward has added to the gradient; returns a handle."""
        leaf: Any = self.tensor
        remover = leaf.register_post_accumulate_grad_hook(call)
        # After swap_tensors the object still has a dict of hooks, but the tensor ignores it.
        leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
        return remover

    def place_last(self, remover: Any) -> None:
        """Move the hook of :meth:`on_grad` behind hooks that came later. Local."""
        hooks: Any = self.tensor._post_accumulate_grad_hooks
        if len(hooks) > 1 and next(reversed(hooks)) != remover.id:
            hooks[remover.id] = hooks.pop(remover.id)

    def __str__(self) -> str:
        return f"{self.name} ({self.module}, {list(self.tensor.shape)})"


def grad_dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's gradient; refuses gradients that may have any dtype."""
    # Only leaves have the attribute; releases of torch before 2.9 lack it.
    known = getattr(tensor, "grad_dtype", tensor.dtype) if tensor.is_leaf else tensor.dtype
    if known is None:
        raise ValueError(
            f"a parameter of shape {list(tensor.shape)} has grad_dtype None, for gradients of any "
            f"dtype, but ranks average gradients of one dtype: set parameter.grad_dtype to it"
        )
    return known


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold this rank's part; of a plain tensor, the tensor itself."""
    return list(tensor.local_memory()) if isinstance(tensor, TiledTensor) else [tensor]


def shared_ranks(tensor: Tensor, group: ProcessGroup) -> list[int]:
    """The group's other ranks, global, that hold parts of a tensor. Local."""
    if not isinstance(tensor, TiledTensor):
        return []
    own = group.global_ranks[group.rank()]
    return sorted(set(tensor.tiling.ranks).intersection(group.global_ranks) - {own})


def grad_leaves(
    modules: Iterable[tuple[str, nn.Module]], ignored: Sequence[str] = ()
) -> list[GradLeaf]:
    """The leaves of parameters that require a gradient, without ``ignored`` names. Local."""
    return [
        GradLeaf(name if len(tensors) == 1 else f"{name}[{at}]", kind, tensor, sparse)
        for name, parameter, kind, sparse in _parameters(modules)
        if parameter.requires_grad and name not in ignored
        for tensors in [local_tensors(parameter)]
        for at, tensor in enumerate(tensors)
    ]


def _parameters(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Parameter, str, bool]]:
    """Every parameter once: name, tensor, module's class, True if the gradient is sparse."""
    seen: set[int] = set()
    for prefix, owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
            yield f"{prefix}.{name}" if prefix else name, parameter, type(owner).__name__, sparse


def grad_view(flat: Tensor, leaf: Tensor) -> Tensor:
    """A view of a bucket's range with the shape, and if dense the strides, of ``leaf``."""
    if leaf.is_contiguous() or not _is_dense(leaf):
        return flat.view(leaf.shape)
    return flat.as_strided(leaf.shape, leaf.stride())


def as_is(grad: Tensor) -> Tensor:
    """The gradient, or a copy that has the values in memory if torch negates it lazily."""
    return grad.resolve_conj().resolve_neg() if grad.is_conj() or grad.is_neg() else grad


def lies_as(leaf: Tensor, grad: Tensor) -> bool:
    """True if a gradient's elements lie in one range, in the order of :func:`grad_view`."""
    if grad.layout is not torch.strided or grad.requires_grad or as_is(grad) is not grad:
        return False
    if leaf.is_contiguous() or not _is_dense(leaf):
        return grad.is_contiguous()
    return grad.stride() == leaf.stride()


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one range of memory without overlap."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
