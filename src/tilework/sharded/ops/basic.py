"""Shape, dtype and flags; functions that read all values are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.tiles import graph_tiles, sharded_argument, wrap
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def of_wrapper(func: Callable[..., Any]) -> Handler:
    """The handler of properties that the wrapper has: global shape, dtype and flags."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return handler


def _is_contiguous(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    return all(tile.is_contiguous(*args[1:], **kwargs) for tile in graph_tiles(args[0]))


def _type_as(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor, other = args
    if not isinstance(tensor, ShardedTensor):
        return tensor.to(other.dtype)
    return wrap(tensor, [tile.to(other.dtype) for tile in graph_tiles(tensor)])


def _new_tensor(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return like.new_tensor(*args[1:], **kwargs)


def _new(fill: Callable[..., Any]) -> Handler:
    """The handler of ``new_zeros`` and similar functions, for the tensor's own size."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        tensor, *rest = args
        size = kwargs.pop("size", None)
        values = [kwargs.pop("fill_value")] if "fill_value" in kwargs else []
        if size is None:
            extents, values = _split_size(rest, fill is torch.full_like)
            size = torch.Size(extents)
        if tuple(size) != tuple(tensor.shape):
            hint = "only of the tensor's own size; else use tilework.sharded with a spec"
            raise unsupported(fill, args, kwargs, hint)
        results = [fill(tile, *values, **kwargs) for tile in graph_tiles(tensor)]
        return wrap(tensor, results)

    return handler


def _split_size(rest: list[Any], has_value: bool) -> tuple[list[int], list[Any]]:
    """The size among positional arguments, a sequence or numbers, and the other arguments."""
    if rest and not isinstance(rest[0], int):
        return list(rest[0]), rest[1:]
    return (rest[:-1], rest[-1:]) if has_value else (rest, [])


def _reads_values(func: Callable[..., Any]) -> Handler:
    hint = "the values are on several ranks: use full_tensor(), or the local shards"

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        if func is Tensor.__bool__ and tensor.numel() != 1:
            raise RuntimeError(
                "Boolean value of a ShardedTensor with more than one value is ambiguous: "
                "use any() or all()"
            )
        raise unsupported(func, args, kwargs, hint)

    return handler


def getters(*names: str) -> list[Callable[..., Any]]:
    """The functions that read these properties of a tensor."""
    return [getattr(Tensor, name).__get__ for name in names]


_OF_WRAPPER = [
    *getters("shape", "dtype", "layout", "device", "ndim", "requires_grad", "is_meta",
        "is_sparse", "is_sparse_csr", "is_quantized", "is_cuda", "is_cpu", "is_mps", "is_xla",
        "is_xpu", "is_nested", "is_mkldnn", "is_vulkan", "itemsize", "nbytes", "name", "_version",
        "_backward_hooks", "_post_accumulate_grad_hooks"),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension",
        "is_floating_point", "is_complex", "is_signed", "element_size", "__len__", "get_device",
        "is_inference", "is_shared")),
    torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel,
    torch.is_inference, torch.get_device, torch._has_compatible_shallow_copy_type,
]  # fmt: skip
_VALUE_READERS = [getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__bool__",
    "__float__", "__int__", "__long__", "__index__", "__complex__", "__array__",
    "__contains__")]  # fmt: skip

TABLE: dict[Callable[..., Any], Handler] = {
    **{f: of_wrapper(f) for f in _OF_WRAPPER},
    **{f: _reads_values(f) for f in _VALUE_READERS},
    Tensor.is_contiguous: _is_contiguous,
    Tensor.type_as: _type_as,
    Tensor.new_tensor: _new_tensor,
    Tensor.new_zeros: _new(torch.zeros_like),
    Tensor.new_ones: _new(torch.ones_like),
    Tensor.new_empty: _new(torch.empty_like),
    Tensor.new_full: _new(torch.full_like),
}
