"""TiledTensor: the base of both tensors, a torch.Tensor that stands for all tiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilework.tiled.torch_checkpoint import InTorchCheckpoints

TiledT = TypeVar("TiledT", bound="TiledTensor")


def is_called_within(package: str) -> bool:
    """True if a package of torch, such as "export", has called this. For errors."""
    frame: FrameType | None = sys._getframe(1)
    part = os.path.join("torch", package, "")
    while frame is not None:
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _instead() -> str:
    if not is_called_within(os.path.join("nn", "parallel")):
        return ""
    return ". torch's DistributedDataParallel takes no sharded tensors; tilework.parallel's does"


class TiledTensor(InTorchCheckpoints, Tensor):
    """A tensor of a global shape; this rank holds the tiles that the tiling assigns to it.

    The tiles are plain tensors with memory and autograd graphs; the TiledTensor itself is a wrapper
    without memory. ``__torch_function__`` intercepts the operators on it, before autograd does.
    """

    @classmethod
    def _wrap(
        cls: type[TiledT],
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> TiledT:
        tensor: TiledT = Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype, device=device, requires_grad=requires_grad
        )
        return tensor

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only calls that bypass the interception come here; they must not lose a gradient or read
        # memory that does not exist.
        if is_called_within("_functorch"):
            raise RuntimeError(
                f"torch.func's transforms (vmap, grad, vjp, jacrev, functionalize) take no "
                f"{cls.__name__}, as {func} was given within one: gradients come by backward() or "
                f"torch.autograd.grad(), and operators take batches; or transform a function of "
                f"plain tensors, from to_local() or full_tensor()"
            )
        raise RuntimeError(
            f"A tilework {cls.__name__} is used from inside torch's C++ by {func}, which "
            f"takes plain tensors only: pass the local tensors, or the plain tensor of "
            f"full_tensor(){_instead()}"
        )
