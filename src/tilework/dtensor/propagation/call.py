"""A call of an operator, as its sharding is found for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.propagation.pytree import Args, Kwargs, with_tensors
from tilework.dtensor.spec import DTensorSpec
from tilework.mesh import DeviceMesh


def unseen() -> AbstractContextManager[Any]:
    """A context for trials at a call's first time, of which the program's modes see nothing.

    A selective checkpoint would keep their results, and look for them when it computes again. A
    tracer's modes stay.
    """
    if not torch._C._len_torch_dispatch_stack() or any(map(_infra_mode, _INFRA)):
        return nullcontext()
    return _disable_current_modes()


_infra_mode = torch._C._get_dispatch_mode
_INFRA = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


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
