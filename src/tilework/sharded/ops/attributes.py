"""Attributes: shape, dtype and flags, gradients and data; and backward.

Functions that read all values are refused. Gradients are those of the tiles, by the tiles' graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

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

# -- gradients and data ------------------------------------------------------------------------

# A type checker reads these as the values, not as the properties.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_SHARDED_ALIKE = "expected a ShardedTensor with the same sharding"


def of_graph(func: Callable[..., Any]) -> Handler:
    """The handler of a property of the graph, which is the same for all tiles and ranks."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return func(graph_tiles(args[0])[0])

    return handler


def _requires_grad_(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    requires_grad = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    for tile in graph_tiles(tensor):
        tile.requires_grad_(requires_grad)
    return settle(tensor)


def _grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor | None:
    tensor: ShardedTensor = args[0]
    # Backward may have reached only some of the tiles.
    return _wrapped_gradient(tensor, [tile.grad for tile in graph_tiles(tensor)])


def _set_grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor, value = args
    tiles = graph_tiles(tensor)
    values = [None] * len(tiles)
    if value is not None:
        values = _tiles_alike(_GRAD.__set__, tensor, value)
    for tile, gradient in zip(tiles, values, strict=True):
        tile.grad = gradient


def _tiles_alike(func: Callable[..., Any], tensor: Any, value: Any) -> list[Any]:
    if not isinstance(value, ShardedTensor) or not isinstance(tensor, ShardedTensor):
        raise unsupported(func, (tensor, value), {}, _SHARDED_ALIKE)
    if value.shape != tensor.shape or not same_layout(tensor, value):
        raise unsupported(func, (tensor, value), {}, OTHER_LAYOUT)
    return graph_tiles(value)


def _data(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    return wrap(args[0], [tile.data for tile in graph_tiles(args[0])])


def _set_data(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor, value = args
    if not isinstance(tensor, ShardedTensor) or not isinstance(value, ShardedTensor):
        raise unsupported(_DATA.__set__, args, kwargs, _SHARDED_ALIKE)
    # Placements may differ, as after Module.to(device): only the boxes must be the same.
    if value.tiling != tensor.tiling or len(graph_tiles(value)) != len(graph_tiles(tensor)):
        raise unsupported(_DATA.__set__, args, kwargs, OTHER_LAYOUT)
    tiles, values = graph_tiles(tensor), graph_tiles(value)
    for tile, other in zip(tiles, values, strict=True):
        tile.data = other  # still the same tensor: an optimizer may hold it
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(tensor, value)
    placed = zip(tiles, value.local_shards(), strict=False)
    tensor._local_shards = [Shard(tile, shard.metadata) for tile, shard in placed]
    tensor._metadata, tensor._sharding_spec = value._metadata, value._sharding_spec
    tensor._process_group = value._process_group
    tensor._set_properties(requires_grad=tensor.requires_grad)
    if not tensor._local_shards:
        keep_stand_in(tensor, tiles[0])


def _tiles_and_gradients(
    tensors: Sequence[Tensor], gradients: Sequence[Any]
) -> tuple[list[Tensor], list[Any]]:
    tiles: list[Tensor] = []
    tile_gradients: list[Any] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if not isinstance(tensor, ShardedTensor):
            tiles.append(tensor)
            tile_gradients.append(gradient)
            continue
        if gradient is None and tensor.numel() == 1:
            gradient = wrap(tensor, [torch.ones_like(tile) for tile in graph_tiles(tensor)])
        if gradient is None:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs: this tensor has shape "
                f"{tuple(tensor.shape)}; reduce it (sum()) or give a gradient of the same sharding"
            )
        tiles += graph_tiles(tensor)
        tile_gradients += _tiles_alike(torch.autograd.backward, tensor, gradient)
    return tiles, tile_gradients


def _listed(value: Any, length: int) -> list[Any]:
    """A list of tensors, or of gradients for them; a list of None if there are none."""
    if value is None:
        return [None] * length
    return [value] if isinstance(value, Tensor) else list(value)


def _backward(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    names = ("tensors", "gradient", "retain_graph", "create_graph", "inputs")
    options = dict(zip(names, args, strict=False)) | kwargs
    tensors = _listed(options.pop("tensors"), 1)
    gradients = options.pop("gradient", None)
    gradients = options.pop("grad_tensors", gradients)
    tiles, tile_gradients = _tiles_and_gradients(tensors, _listed(gradients, len(tensors)))
    if options.get("inputs") is not None:
        options["inputs"] = [tile for x in _listed(options["inputs"], 1) for tile in _tiles_of(x)]
    torch.autograd.backward(tiles, tile_gradients, **options)


def _tiles_of(tensor: Tensor) -> list[Tensor]:
    return graph_tiles(tensor) if isinstance(tensor, ShardedTensor) else [tensor]


def _autograd_grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    options = dict(zip(names, args, strict=False)) | kwargs
    outputs = _listed(options.pop("outputs"), 1)
    gradients = _listed(options.pop("grad_outputs", None), len(outputs))
    tiles, tile_gradients = _tiles_and_gradients(outputs, gradients)
    inputs = _listed(options.pop("inputs"), 1)
    flat, form = pytree.tree_flatten([_tiles_of(tensor) for tensor in inputs])
    results = torch.autograd.grad(tiles, flat, tile_gradients, **options)
    by_input = zip(inputs, pytree.tree_unflatten(results, form), strict=True)
    return tuple(_wrapped_gradient(tensor, gradients) for tensor, gradients in by_input)


def _wrapped_gradient(tensor: Tensor, gradients: list[Tensor | None]) -> Tensor | None:
    if not isinstance(tensor, ShardedTensor):
        return gradients[0]
    if all(gradient is None for gradient in gradients):
        return None
    pairs = zip(graph_tiles(tensor), gradients, strict=True)
    return wrap(tensor, [torch.zeros_like(t) if g is None else g for t, g in pairs])


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
    **{f: of_graph(f) for f in getters("is_leaf", "grad_fn", "retains_grad", "output_nr")},
    Tensor.requires_grad_: _requires_grad_,
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _autograd_grad,
}
