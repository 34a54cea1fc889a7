"""Operators along dims that are not sharded: each tile has everything that the results need.

Softmax, sorting, cumulated sums, and reductions over some dims. The result is sharded along the
other dims as before; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.ask_rule import local_call, static_key
from tilework.sharded.ops.result_layout import ResultLayout, cached, layout_of_boxes, of_tiles
from tilework.sharded.ops.tiles import graph_tiles, sharded_argument, zeros_after
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import Factor, FactorMap, LocalOp, NotLocal, dim_factors, propagate_boxes
from tilework.tiled.rules import dim_at

SHARDED_DIM = (
    "it runs along dims that are not sharded: reshard to a spec that leaves dim {} unsharded"
)


def options_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments after the tensor, by name."""
    options = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    if "axis" in options:
        options["dim"] = options.pop("axis")
    return options


def dims_of(tensor: Tensor, dim: Any) -> tuple[int, ...] | None:
    """The dims of an argument ``dim``, ascending, counted from the first; None: all of them.

    Raises:
        IndexError: The tensor has no such dim.
    """
    dims = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted({dim_at(dim, tensor.dim()) for dim in dims})) or None


def unsharded(shape: Sequence[int], dims: Sequence[int], kept: bool = True) -> FactorMap:
    """The factor map of an operator that needs all of some dims in each tile.

    Args:
        shape: The shape of the tensor.
        dims: The dims that each tile needs in full.
        kept: True if the result has these dims, too, of any size.
    """
    inputs = [Factor(size, unshardable=dim in dims) for dim, size in enumerate(shape)]
    outputs = [
        None if dim in dims else factor
        for dim, factor in enumerate(inputs)
        if kept or dim not in dims
    ]
    return FactorMap((dim_factors(inputs),), (dim_factors(outputs),))


def _propagate(tensor: ShardedTensor, dims: tuple[int, ...], kept: bool) -> LocalOp | NotLocal:
    make = lambda: propagate_boxes(unsharded(tensor.shape, dims, kept), [tensor.tiling])  # noqa: E731
    return cached(tensor, ("unsharded", dims, kept), make)


def run_along(
    func: Callable[..., Any],
    tensor: ShardedTensor,
    dims: tuple[int, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """``func`` on each tile, where it needs all of ``dims``, and any part of the others."""
    op = _propagate(tensor, dims, kept=True)
    if isinstance(op, NotLocal):
        raise unsupported(func, (tensor, *args), kwargs, SHARDED_DIM.format(op.dim))
    tiles = [_with_elements(tensor, tile, dims) for tile in graph_tiles(tensor)]
    results = [func(tile, *args, **kwargs) for tile in tiles]
    if isinstance(results[0], Tensor):
        return _wrapped(tensor, dims, results)
    columns = [_wrapped(tensor, dims, column) for column in zip(*results, strict=True)]
    kind = type(results[0])
    return columns if kind is list else tuple(columns) if kind is tuple else kind(columns)


def _with_elements(tensor: ShardedTensor, tile: Tensor, dims: Sequence[int]) -> Tensor:
    """The tile, or zeros if it is empty, to find the dtypes and extents of results."""
    if tile.numel():
        return tile
    sizes = enumerate(zip(tile.shape, tensor.shape, strict=True))
    return zeros_after(tensor, [size if d in dims else max(n, 1) for d, (n, size) in sizes])


def _wrapped(
    tensor: ShardedTensor, dims: tuple[int, ...], results: Sequence[Tensor]
) -> ShardedTensor:
    """The sharded tensor of each tile's result."""
    first = results[0]
    kept = first.dim() == tensor.dim()
    extents = tuple([first.shape[dim] for dim in dims]) if kept else None

    def evaluate() -> ResultLayout:
        op = _propagate(tensor, dims, kept)
        assert isinstance(op, LocalOp)
        size = list(tensor.shape)
        for dim, extent in zip(dims, extents or (), strict=False):
            size[dim] = extent
        if not kept:
            size = [n for dim, n in enumerate(size) if dim not in dims]
        return layout_of_boxes(tensor, size, op.boxes(0, size))

    layout = cached(tensor, ("along", dims, extents), evaluate)
    parts = iter(results)

    def apply(tile: Tensor, number: int, sizes: Sequence[int]) -> Tensor:
        result = next(parts)
        return result if result.shape == sizes else result[tuple(slice(n) for n in sizes)]

    return of_tiles(tensor, layout, apply, stand_in=first)


def _along(func: Callable[..., Any], name: str) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        options = args[1:], {k: v for k, v in kwargs.items() if k not in ("input", "self")}
        key = func, *map(static_key, options)
        dims = cached(tensor, key, lambda: _dims(func, name, tensor, *options))
        if dims is None:
            raise unsupported(func, args, kwargs, "give it a dim, and no out")
        return run_along(func, tensor, dims, *options)

    return handler


def _dims(
    func: Callable[..., Any],
    name: str,
    tensor: ShardedTensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """The dims that each tile needs in full, by the operator's rule; None without a rule."""
    if kwargs.get("out") is not None:
        return None
    if name == "normalize":  # no rule, and arguments (p, dim)
        args, kwargs = args[1:2] or (kwargs.get("dim", 1),), {}
    try:
        call = local_call(_RULED_AS.get(name, name), func, (tensor, *args), kwargs)
    except TypeError:
        return None
    if call is None:
        return None
    return tuple(
        dim
        for dim, factors in enumerate(call.map.inputs[0])
        if not factors or factors[0].unshardable
    )


_NAMES = """
    softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort topk flip
    normalize glu
"""
_ALONG = frozenset(_NAMES.split())
#: Functions without a rule that run along the same dims as another operator.
_RULED_AS = {"softmin": "softmax", "normalize": "softmax"}


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of an operator along a dim."""
    return _along(func, name) if name in _ALONG else None
