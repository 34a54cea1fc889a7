"""DTensors in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilework.dtensor.spec import DTensorSpec

if TYPE_CHECKING:
    from tilework.dtensor.tensor import DTensor


def reduce(tensor: DTensor) -> Any:
    """What pickle keeps of a DTensor."""
    return _rebuild, (tensor._local_tensor.detach(), tensor._spec, tensor.requires_grad)


def _rebuild(local: Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    from tilework.dtensor.tensor import wrap

    return wrap(local.requires_grad_(requires_grad), spec)
