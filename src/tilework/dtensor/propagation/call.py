"""A call of an operator, as its sharding is found for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.propagation.pytree import Args, Kwargs, with_tensors
from tilework.dtensor.spec import DTensorSpec
from tilework.mesh import DeviceMesh


class Call(NamedTuple):
    """A call of an operator."""

    func: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    #: Those among the arguments, in order: DTensors and plain ones.
    tensors: Sequence[Tensor]
    mesh: DeviceMesh
    #: The provenance digest of its result.
    digest: int = 0

    @property
    def specs(self) -> list[DTensorSpec]:
        """The layouts of its DTensors."""
        return [tensor._spec for tensor in self.tensors if isinstance(tensor, DTensorBase)]

    def on_meta(self) -> Any:
        """The result for tensors without memory."""
        return self.on_tensors(
            [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.tensors]
        )

    def on_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The result for other tensors."""
        args, kwargs = with_tensors(self.args, self.kwargs, iter(tensors))
        with torch.no_grad():
            return self.func(*args, **kwargs)
