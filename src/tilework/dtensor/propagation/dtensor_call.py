"""A call of an operator, the input of sharding propagation."""

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
    """A context for trial runs of an operator, in which the program's dispatch modes are off.

    Trials come before the first call of a signature. With the modes on, a selective checkpoint
    would store the results of trials, and miss them in the recomputation. Only the modes of a
    tracer stay active.
    """
    if not torch._C._len_torch_dispatch_stack() or any(map(_infra_mode, _INFRA)):
        return nullcontext()
    return _disable_current_modes()


_infra_mode = torch._C._get_dispatch_mode
_INFRA = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


class DTensorCall(NamedTuple):
    """A call of an operator with DTensors."""

    #: The torch function that was called.
    func: Callable[..., Any]
    #: The positional arguments.
    args: Args
    #: The keyword arguments.
    kwargs: Kwargs
    #: The tensors among the arguments, in order: DTensors and plain tensors.
    tensors: Sequence[Tensor]
    #: The mesh of the DTensors among the arguments.
    mesh: DeviceMesh
    #: The provenance digest of the result.
    digest: int = 0

    @property
    def specs(self) -> list[DTensorSpec]:
        """The layouts of the DTensors among the arguments."""
        return [tensor._spec for tensor in self.tensors if isinstance(tensor, DTensorBase)]

    def on_meta(self) -> Any:
        """The result of the call with a meta tensor in place of each tensor."""
        return self.on_tensors(
            [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.tensors]
        )

    def on_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the call with ``tensors`` in place of the tensors, without gradients."""
        args, kwargs = with_tensors(self.args, self.kwargs, iter(tensors))
        with torch.no_grad():
            return self.func(*args, **kwargs)
