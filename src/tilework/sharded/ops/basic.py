"""Shape, dtype and flags; gradients; what asks for values that no rank alone has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.sharded.checks import unsupported
from tilework.sharded.metadata import Shard
from tilework.sharded.ops.tiles import (
    OTHER_LAYOUT,
    graph_tiles,
    keep_stand_in,
    same_layout,
    settle,
    sharded_argument,
    wrap,
)
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor

# To a type checker these are the values, not the properties.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


def of_wrapper(func: Callable[..., Any]) -> Handler:
    """The operator's own answer: the wrapper has the global shape, the dtype and the flags."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return handler


def of_graph(func: Callable[..., Any]) -> Handler:
    """What the tiles say of their graph, which is the same on every rank."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return func(graph_tiles(args[0])[0])

    return handler


def _requires_grad_(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    for tile in graph_tiles(tensor):
        tile.requires_grad_(wanted)
    return settle(tensor)


def _is_contiguous(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    return all(tile.is_contiguous(*args[1:], **kwargs) for tile in graph_tiles(args[0]))


def _grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor | None:
    tensor: ShardedTensor = args[0]
    tiles = graph_tiles(tensor)
    found = [tile.grad for tile in tiles]
    if all(gradient is None for gradient in found):
        return None
    # Backward may have come to some of the tiles only.
    known = zip(tiles, found, strict=True)
    return wrap(tensor, [torch.zeros_like(t) if g is None else g for t, g in known])


def _set_grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor, value = args
    tiles = graph_tiles(tensor)
    values = [None] * len(tiles)
    if value is not None:
        values = _alike(_GRAD.__set__, tensor, value)
    for tile, gradient in zip(tiles, values, strict=True):
        tile.grad = gradient


def _alike(func: Callable[..., Any], tensor: Any, value: Any) -> list[Any]:
    if not isinstance(value, ShardedTensor) or not isinstance(tensor, ShardedTensor):
        hint = "expected a ShardedTensor cut alike"
        raise unsupported(func, (tensor, value), {}, hint)
    if value.shape != tensor.shape or not same_layout(tensor, value):
        raise unsupported(func, (tensor, value), {}, OTHER_LAYOUT)
    return graph_tiles(value)


def _data(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    return wrap(args[0], [tile.data for tile in graph_tiles(args[0])])


def _set_data(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor, value = args
    if not isinstance(tensor, ShardedTensor) or not isinstance(value, ShardedTensor):
        hint = "expected a ShardedTensor cut alike"
        raise unsupported(_DATA.__set__, args, kwargs, hint)
    # Placements may differ, as after Module.to(device): only the cuts must be the same.
    if value.tiling != tensor.tiling or len(graph_tiles(value)) != len(graph_tiles(tensor)):
        raise unsupported(_DATA.__set__, args, kwargs, OTHER_LAYOUT)
    tiles, values = graph_tiles(tensor), graph_tiles(value)
    for tile, other in zip(tiles, values, strict=True):
        tile.data = other  # still the same tensor: an optimizer may know it
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(tensor, value)
    placed = zip(tiles, value.local_shards(), strict=False)
    tensor._local_shards = [Shard(tile, shard.metadata) for tile, shard in placed]
    tensor._metadata, tensor._sharding_spec = value._metadata, value._sharding_spec
    tensor._process_group = value._process_group
    tensor._set_properties(requires_grad=tensor.requires_grad)
    if not tensor._local_shards:
        keep_stand_in(tensor, tiles[0])


def _backward(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor = args[0]
    gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
    if gradient is None and tensor.numel() == 1:
        gradient = wrap(tensor, [torch.ones_like(tile) for tile in graph_tiles(tensor)])
    if gradient is None:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs: this tensor has shape "
            f"{tuple(tensor.shape)}; reduce it (sum()) or give backward a gradient cut as it is"
        )
    gradients = _alike(Tensor.backward, tensor, gradient)
    torch.autograd.backward(graph_tiles(tensor), gradients, *args[2:], **kwargs)


def _type_as(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor, other = args
    if not isinstance(tensor, ShardedTensor):
        return tensor.to(other.dtype)
    return wrap(tensor, [tile.to(other.dtype) for tile in graph_tiles(tensor)])


def _new(fill: Callable[..., Any]) -> Handler:
    """``new_zeros`` and its like, of the tensor's own size."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        tensor, *rest = args
        size = kwargs.pop("size", None)
        values = [kwargs.pop("fill_value")] if "fill_value" in kwargs else []
        if size is None:
            given, values = _split_size(rest, fill is torch.full_like)
            size = torch.Size(given)
        if tuple(size) != tuple(tensor.shape):
            hint = "only of the tensor's own size; else use tilework.sharded with a spec"
            raise unsupported(fill, args, kwargs, hint)
        results = [fill(tile, *values, **kwargs) for tile in graph_tiles(tensor)]
        return wrap(tensor, results)

    return handler


def _split_size(rest: list[Any], has_value: bool) -> tuple[list[int], list[Any]]:
    if rest and not isinstance(rest[0], int):
        return list(rest[0]), rest[1:]
    return (rest[:-1], rest[-1:]) if has_value else (rest, [])


def _reads_values(func: Callable[..., Any]) -> Handler:
    hint = "its values are on several ranks: use full_tensor(), or the local shards"

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        if func is Tensor.__bool__ and tensor.numel() != 1:
            raise RuntimeError(
                "Boolean value of a ShardedTensor with more than one value is ambiguous: "
                "use any() or all()"
            )
        raise unsupported(func, args, kwargs, hint)

    return handler


def _getters(*names: str) -> list[Callable[..., Any]]:
    return [getattr(Tensor, name).__get__ for name in names]


_OF_WRAPPER = [
    *_getters("shape", "dtype", "layout", "device", "ndim", "requires_grad", "is_meta",
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
    "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__")]  # fmt: skip

TABLE: dict[Callable[..., Any], Handler] = {
    **{f: of_wrapper(f) for f in _OF_WRAPPER},
    **{f: of_graph(f) for f in _getters("is_leaf", "grad_fn", "retains_grad", "output_nr")},
    **{f: _reads_values(f) for f in _VALUE_READERS},
    Tensor.is_contiguous: _is_contiguous,
    Tensor.requires_grad_: _requires_grad_,
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    Tensor.backward: _backward,
    Tensor.type_as: _type_as,
    Tensor.new_zeros: _new(torch.zeros_like),
    Tensor.new_ones: _new(torch.ones_like),
    Tensor.new_empty: _new(torch.empty_like),
    Tensor.new_full: _new(torch.full_like),
}
