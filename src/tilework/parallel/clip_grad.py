"""Clipping of gradients by their norm, whatever their layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from tilework.dtensor import DTensor
from tilework.dtensor.torch_tensors import is_torch_dtensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The norm of all gradients together, which are scaled down so that it is ``max_norm`` at most.

    As torch's function of this name, which serves where all gradients are plain, or DTensors on one
    mesh; here they may be some of each, and DTensors of torch's. Collective over the meshes of
    DTensors; blocks.

    Args:
        parameters: The parameters; those without a gradient are left out. The same on all ranks.
        max_norm: The largest norm that is left as it is.
        norm_type: The p of the p-norm; ``inf`` for the largest element.
        error_if_nonfinite: Raise if the norm is infinite or not a number.

    Returns:
        The norm before clipping: a plain tensor, the same on all ranks.

    Raises:
        RuntimeError: ``error_if_nonfinite``, and the norm is infinite or not a number.

    Example:
        >>> import torch
        >>> from tilework.parallel import clip_grad_norm_
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0).item()
        5.0
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in every if p.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in grads:
        mesh: Any = cast(Any, grad).device_mesh if _is_distributed(grad) else None
        by_mesh.setdefault(mesh, []).append(grad)
    norms = [_norm(alike, norm_type, error_if_nonfinite) for alike in by_mesh.values()]
    if not norms:
        return torch.tensor(0.0)
    stacked = torch.stack([norm.to(norms[0]) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local: Tensor = cast(Any, grad).to_local() if _is_distributed(grad) else grad
        local.mul_(factor.to(local.device))
    return total


def _norm(grads: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
    full: Tensor = cast(Any, norm).full_tensor() if _is_distributed(norm) else norm
    return full


def _is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor, torch's too."""
    return isinstance(tensor, DTensor) or is_torch_dtensor(tensor)
