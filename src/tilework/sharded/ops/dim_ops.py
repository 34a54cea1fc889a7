"""Operators along dims that are not cut: each tile has all that its results need.

Softmax, sorting, cumulated sums, and reductions over some dims. The result is a sharded tensor,
cut along the other dims as before; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tilework.layout import Box
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.elementwise import spellings
from tilework.sharded.ops.tiles import graph_tiles, recut, sharded_argument, zeros_after
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor

CUT = "it runs along dims that are not cut: reshard to a spec that leaves dim {} whole"

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


def first_cut(tensor: ShardedTensor, dims: Sequence[int]) -> int | None:
    """The first of these dims along which a tile has not all."""
    boxes = [shard.box for shard in tensor.metadata().shards_metadata]
    cut = (d for d in dims if any(box.sizes[d] != tensor.shape[d] for box in boxes))
    return next(cut, None)


def run_along(
    func: Callable[..., Any],
    tensor: ShardedTensor,
    dims: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """``func`` on each tile, where it needs the whole of ``dims``, and of the others nothing."""
    cut = first_cut(tensor, dims)
    if cut is not None:
        raise unsupported(func, (tensor, *args), kwargs, CUT.format(cut))
    tiles = [_with_elements(tensor, tile, dims) for tile in graph_tiles(tensor)]
    results = [func(tile, *args, **kwargs) for tile in tiles]
    if isinstance(results[0], Tensor):
        return _whole(tensor, dims, results)
    each = [_whole(tensor, dims, column) for column in zip(*results, strict=True)]
    kind = type(results[0])
    return each if kind is list else tuple(each) if kind is tuple else kind(each)


def _with_elements(tensor: ShardedTensor, tile: Tensor, dims: Sequence[int]) -> Tensor:
    """The tile; for an empty one zeros, which only show what dtypes and extents come out."""
    if tile.numel():
        return tile
    sizes = enumerate(zip(tile.shape, tensor.shape, strict=True))
    return zeros_after(tensor, [whole if d in dims else max(n, 1) for d, (n, whole) in sizes])


def _whole(tensor: ShardedTensor, dims: Sequence[int], results: Sequence[Tensor]) -> ShardedTensor:
    first = results[0]
    kept = first.dim() == tensor.dim()

    def changed(numbers: Sequence[int], along: Sequence[int]) -> tuple[int, ...]:
        """One number per dim of the result: as before, but for ``dims``."""
        if kept:
            return tuple(along[d] if d in dims else n for d, n in enumerate(numbers))
        return tuple(n for d, n in enumerate(numbers) if d not in dims)

    def place(box: Box) -> Box:
        offsets = changed(box.offsets, [0] * tensor.dim())
        return Box(offsets, changed(box.sizes, first.shape))

    parts = iter(results)

    def apply(tile: Tensor, box: Box) -> Tensor:
        result, sizes = next(parts), place(box).sizes
        return result if result.shape == sizes else result[tuple(slice(n) for n in sizes)]

    return recut(tensor, changed(tensor.shape, first.shape), place, apply, stand_in=first)


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


TABLE: dict[Callable[..., Any], Handler] = {
    func: _along(func, *arguments) for name, arguments in _ALONG.items() for func in spellings(name)
}
