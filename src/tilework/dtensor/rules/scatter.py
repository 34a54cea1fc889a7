"""Scattering: scatter, scatter_add, scatter_reduce, and writing to views of a copy.

In a sharded dim each rank writes the elements of the local shard; the tensor's layout stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.rules.index_read import narrow_to
from tilework.dtensor.rules.index_write import on_mesh, register_writer
from tilework.dtensor.views.moved_views import window_after
from tilework.tiled import Arg, Factor, LocalRanges, RuleResult, composed, dtensor_rule, local_call
from tilework.tiled.rules import LocalIndexRange, cat_shards, dim_at


def _scatter_rule(name: str) -> Callable[..., RuleResult]:
    """The rule by which scattering runs on shards, if all sizes are equal except along the dim."""
    anew, in_place = getattr(Tensor, name), getattr(Tensor, name + "_")

    def here(writes: bool, input: Arg, dim: int, index: Arg, *args: Any, **kwargs: Any) -> Any:
        source = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Arg)), None)
        if not _lie_alike(input, dim, index, source):
            return None
        dim = dim_at(dim, input.ndim)
        dims = [Factor(size, f"d{i}", reduce_op=None) for i, size in enumerate(input.shape)]
        source_dims: list[Factor | None] = [*dims]
        source_dims[dim] = None
        inputs: dict[Arg, Any] = {input: dims, index: source_dims}
        if source is not None:
            inputs[source] = source_dims
        plain = name == "scatter_add" or (name == "scatter" and "reduce" not in kwargs)
        linear = [[input, source]] if plain and source is not None else []

        def run(ranges: LocalRanges) -> Callable[..., Any]:
            span = LocalIndexRange(ranges, dims[dim])

            def scatter(x: Tensor, places: Tensor, *values: Tensor) -> Any:
                rest = [values[0] if isinstance(arg, Arg) else arg for arg in args]
                named = {k: values[0] if isinstance(v, Arg) else v for k, v in kwargs.items()}
                if span.is_full:
                    return (in_place if writes else anew)(x, dim, places, *rest, **named)
                return _write_with_spare_place(
                    x, dim, places, span, lambda y, at: in_place(y, dim, at, *rest, **named)
                )

            return scatter

        return local_call(inputs, [dims], linear=linear, run=run)

    return here


def _lie_alike(input: Arg, dim: int, index: Any, source: Arg | None) -> bool:
    """True if input, index and source have equal shapes, except along the input's ``dim``."""
    if not input.ndim or not isinstance(index, Arg) or index.ndim != input.ndim:
        return False
    if source is not None and source.shape != index.shape:
        return False
    dim = dim_at(dim, input.ndim)
    return all(input.shape[i] == index.shape[i] for i in range(input.ndim) if i != dim)


def _write_with_spare_place(
    x: Tensor,
    dim: int,
    places: Tensor,
    span: LocalIndexRange,
    write: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Write at global places; other ranks' elements go to a spare place."""
    numbers, mine = span.localize(places)
    sizes = list(x.shape)
    sizes[dim] = 1
    wider = cat_shards([x, x.new_zeros(sizes)], dim)
    return write(wider, numbers.where(mine, span.count)).narrow(dim, 0, span.count)


def _scatter_in_place(name: str) -> Callable[..., None]:
    def body(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> None:
        if not index.numel():  # torch accepts any shape
            values = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            _write_nothing(input, [value for value in values if value.requires_grad])
            return
        if input.dim() == 0:
            input, index = input.view(1), index if index.dim() else index.view(1)
        region = narrow_to(input, index, dim)
        sizes = [size for i, size in enumerate(region.shape) if i != dim % region.dim()]
        if sizes != [size for i, size in enumerate(index.shape) if i != dim % region.dim()]:
            raise RuntimeError(
                f"Expected index {list(index.shape)} to be no larger than self "
                f"{list(input.shape)} apart from dimension {dim}"
            )

        def fit(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return narrow_to(value if value.dim() else value.reshape(1), index)

        getattr(region, name + "_")(
            dim, index, *map(fit, args), **{key: fit(value) for key, value in kwargs.items()}
        )

    return body


def _write_nothing(target: Tensor, graded: Sequence[Tensor]) -> None:
    """Write no elements, as a counted write with ``graded`` in the target's graph."""
    empty = (target if target.dim() else target.view(1)).narrow(0, 0, 0)
    if not graded:
        empty.zero_()
    for value in graded:
        empty.add_(value.flatten()[:0].reshape(empty.shape))


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    register_writer(_name, _scatter_rule(_name), _scatter_in_place(_name))


# -- ranges and diagonals --------------------------------------------------------------------


def _copy_with(
    input: Tensor, src: Tensor, view: Callable[[Tensor], Tensor], write: Callable[[Tensor], Any]
) -> Tensor:
    """A copy of a tensor, with a source written to the elements that ``view`` returns."""
    input = on_mesh(input, src)
    window = window_after(input, view)
    if tuple(src.shape) != tuple(window.size):
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = "
            f"{list(src.shape)}, slice size = {list(window.size)}"
        )
    if input._spec.overlaps and not input._spec.repeats:
        raise RuntimeError(
            f"a scatter to {input!r}, of which several elements share a place in memory, as "
            f"unfold() makes them: torch copies the memory, not the elements. clone() it first"
        )
    copy = input.clone()
    write(copy)
    return copy


@dtensor_rule("diagonal_scatter")
@composed
def _diagonal_scatter(input: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    def view(x: Tensor) -> Tensor:
        return torch.diagonal(x, *args, **kwargs)

    return _copy_with(input, src, view, lambda copy: view(copy).copy_(src))


@dtensor_rule("select_scatter")
@composed
def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    at = (slice(None),) * dim_at(dim, input.dim()) + (index,)
    return _copy_with(input, src, itemgetter(at), lambda x: Tensor.__setitem__(x, at, src))


@dtensor_rule("slice_scatter")
@composed
def _slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    at = (slice(None),) * dim_at(dim, input.dim()) + (slice(start, end, step),)
    return _copy_with(input, src, itemgetter(at), lambda x: Tensor.__setitem__(x, at, src))
