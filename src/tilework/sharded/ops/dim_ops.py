"""Operators along dims that are not cut: each tile has all that its results need.

Softmax, sorting, cumulated sums, and reductions over some dims. The result is a sharded tensor,
cut along the other dims as before; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.result_layout import layout_of_result, local_op, of_tiles
from tilework.sharded.ops.tiles import graph_tiles, sharded_argument, zeros_after
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.box_propagation import NotLocal
from tilework.tiled.factors import Factor, FactorMap, dim_factors

SHARDED_DIM = "it runs along dims that are not cut: reshard to a spec that leaves dim {} whole"

#: What keeps a tensor's shape, or changes only the dim's extent, by the arguments after the
#: tensor; and the dim if none is given.
_ALONG: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "softmax": (("dim",), None),
    "log_softmax": (("dim",), None),
    "softmin": (("dim",), None),
    "cumsum": (("dim",), None),
    "cumprod": (("dim",), None),
    "cummax": (("dim",), None),
    "cummin": (("dim",), None),
    "logcumsumexp": (("dim",), None),
    "sort": (("dim",), -1),
    "argsort": (("dim",), -1),
    "topk": (("k", "dim"), -1),
    "flip": (("dims",), None),
    "normalize": (("p", "dim"), 1),
    "glu": (("dim",), -1),
}


def options_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments after the tensor, by name."""
    given = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    if "axis" in given:
        given["dim"] = given.pop("axis")
    return given


def dims_of(tensor: Tensor, given: Any) -> tuple[int, ...] | None:
    """Dims as an operator was given them, counted from the first; None: all of them.

    Raises:
        IndexError: The tensor has no such dim.
    """
    if given is None or given == ():
        return None
    dims, ndim = (given,) if isinstance(given, int) else tuple(given), max(tensor.dim(), 1)
    for dim in dims:
        if not -ndim <= dim < ndim:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], "
                f"but got {dim})"
            )
    return tuple(sorted({dim % ndim for dim in dims})) or None


def unsharded(shape: Sequence[int], dims: Sequence[int], kept: bool = True) -> FactorMap:
    """The map of an operator along dims that each tile needs whole.

    Args:
        shape: The tensor's.
        dims: Those dims.
        kept: Whether the result has them too, of whatever size.
    """
    inputs = [Factor(size, unshardable=dim in dims) for dim, size in enumerate(shape)]
    outputs = [
        None if dim in dims else factor
        for dim, factor in enumerate(inputs)
        if kept or dim not in dims
    ]
    return FactorMap((dim_factors(inputs),), (dim_factors(outputs),))


def run_along(
    func: Callable[..., Any],
    tensor: ShardedTensor,
    dims: tuple[int, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """``func`` on each tile, where it needs all of ``dims``, and of the others nothing."""
    local = local_op(tensor, ("along", dims), lambda: unsharded(tensor.shape, dims))
    if isinstance(local, NotLocal):
        raise unsupported(func, (tensor, *args), kwargs, SHARDED_DIM.format(local.dim))
    tiles = [_with_elements(tensor, tile, dims) for tile in graph_tiles(tensor)]
    results = [func(tile, *args, **kwargs) for tile in tiles]
    if isinstance(results[0], Tensor):
        return _wrapped(tensor, dims, results)
    columns = [_wrapped(tensor, dims, column) for column in zip(*results, strict=True)]
    kind = type(results[0])
    return columns if kind is list else tuple(columns) if kind is tuple else kind(columns)


def _with_elements(tensor: ShardedTensor, tile: Tensor, dims: Sequence[int]) -> Tensor:
    """The tile; for an empty one zeros, which only show what dtypes and extents come out."""
    if tile.numel():
        return tile
    sizes = enumerate(zip(tile.shape, tensor.shape, strict=True))
    return zeros_after(tensor, [size if d in dims else max(n, 1) for d, (n, size) in sizes])


def _wrapped(
    tensor: ShardedTensor, dims: tuple[int, ...], results: Sequence[Tensor]
) -> ShardedTensor:
    """The sharded tensor of what came of each tile."""
    first = results[0]
    kept = first.dim() == tensor.dim()
    extents = tuple([first.shape[dim] for dim in dims]) if kept else None

    def size() -> list[int]:
        if kept:
            return [first.shape[d] if d in dims else n for d, n in enumerate(tensor.shape)]
        return [n for d, n in enumerate(tensor.shape) if d not in dims]

    layout = layout_of_result(
        tensor, ("along", dims, extents), lambda: unsharded(tensor.shape, dims, kept), size
    )
    assert layout is not None
    parts = iter(results)

    def apply(tile: Tensor, number: int, sizes: Sequence[int]) -> Tensor:
        result = next(parts)
        return result if result.shape == sizes else result[tuple(slice(n) for n in sizes)]

    return of_tiles(tensor, layout, apply, stand_in=first)


def _along(func: Callable[..., Any], names: tuple[str, ...], default: int | None) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = sharded_argument(func, args, kwargs)
        options = options_of(names, args, kwargs)
        given = options.get("dim", options.get("dims", default))
        if len(args) > 2 and names == ("dims",):
            given = args[1:]
        dims = dims_of(tensor, given)
        if dims is None or options.get("out") is not None:
            raise unsupported(func, args, kwargs, "give it a dim, and no out")
        others = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
        return run_along(func, tensor, dims, args[1:], others)

    return handler


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of an operator along a dim."""
    arguments = _ALONG.get(name)
    return None if arguments is None else _along(func, *arguments)
