"""What does not touch the values: shape, dtype, flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def of_wrapper(func: Callable[..., Any]) -> Handler:
    """The operator's own answer: the wrapper has the global shape, the dtype and the flags."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return handler


def _detach(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return tensor.like((tile.detach() for tile in tensor.local_tiles()), requires_grad=False)


def _requires_grad_(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.requires_grad_(tensor, wanted)
    for tile in tensor.local_tiles():
        tile.requires_grad_(wanted)
    tensor._set_properties(requires_grad=wanted)
    return tensor


_ATTRIBUTES = ("shape", "dtype", "layout", "device", "ndim", "requires_grad", "is_leaf", "is_meta",
    "is_sparse", "is_quantized", "is_cuda", "is_cpu", "itemsize", "nbytes")  # fmt: skip
_METHODS = ("size", "dim", "numel", "nelement", "ndimension", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "element_size", "__len__")  # fmt: skip

TABLE: dict[Callable[..., Any], Handler] = {
    **{f: of_wrapper(f) for f in (getattr(Tensor, n).__get__ for n in _ATTRIBUTES)},
    **{f: of_wrapper(f) for f in (getattr(Tensor, n) for n in _METHODS)},
    torch.is_floating_point: of_wrapper(torch.is_floating_point),
    torch.is_complex: of_wrapper(torch.is_complex),
    torch.numel: of_wrapper(torch.numel),
    Tensor.detach: _detach,
    Tensor.requires_grad_: _requires_grad_,
}
