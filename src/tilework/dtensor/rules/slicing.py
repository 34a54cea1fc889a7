"""Ranges and single elements of dims: narrow, select, split, chunk, unbind, and basic indexing.

What is taken of a cut dim stays on the ranks that have it; the result is then cut unevenly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.placed_call import DTensorArg, PlacedCall
from tilework.dtensor.rules.reshaping import dim_at
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.resize_shards import Resize, resizable, resized, unsharded
from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult, local_call
from tilework.tiled.op_table import rule

#: What basic indexing does to one dim: takes a range, takes one element, or makes a new dim.
Item = slice | int | None


def taken(start: int, stop: int, step: int, offset: int, size: int) -> slice:
    """Which elements of a part a range takes."""
    # The first of the range that is not before the part.
    first = max(start, start + -(-(offset - start) // step) * step)
    end = min(stop, offset + size)
    return slice(first - offset, max(end, first) - offset, step) if first < end else slice(0, 0)


def length(one: slice) -> int:
    """How many elements a range has that starts at 0 or later."""
    return len(range(one.start, one.stop, one.step or 1))


def measure(start: int, stop: int, step: int) -> Resize:
    """For parts of a dim how much of a range they have."""
    return lambda parts: [length(taken(start, stop, step, *part)) for part in parts]


def sliced(input: DTensorArg, items: Sequence[Item]) -> RuleResult:
    """Basic indexing that takes single elements only of dims that are not cut.

    Args:
        input: The tensor.
        items: For all dims, in order, what is taken; and where new dims are.
    """
    # An axis of one rank cuts nothing.
    spec = unsharded(input.spec, [dim for dim, item in _by_dim(items) if isinstance(item, int)])
    spans = {
        dim: item.indices(input.shape[dim])
        for dim, item in _by_dim(items)
        if isinstance(item, slice)
    }
    changed = {dim: span for dim, span in spans.items() if span != (0, input.shape[dim], 1)}
    measures = {dim: measure(*span) for dim, span in changed.items() if spec.axes_of(dim)}
    source, sizes = resizable(spec, measures)
    shape, dims = _result(items, spans)
    return PlacedCall(
        [source], [resized(source, shape, dims, sizes)], _run(items, spans, changed, source)
    )


def _by_dim(items: Sequence[Item]) -> list[tuple[int, Item]]:
    return list(enumerate(item for item in items if item is not None))


def _result(
    items: Sequence[Item], spans: dict[int, tuple[int, int, int]]
) -> tuple[Ints, dict[int, int]]:
    """The shape of what is taken, and where dims are in it."""
    shape: list[int] = []
    dims: dict[int, int] = {}
    dim = 0
    for item in items:
        if item is None:
            shape.append(1)
            continue
        if isinstance(item, slice):
            dims[dim] = len(shape)
            shape.append(len(range(*spans[dim])))
        dim += 1
    return tuple(shape), dims


def _run(
    items: Sequence[Item],
    spans: dict[int, tuple[int, int, int]],
    changed: dict[int, tuple[int, int, int]],
    source: DTensorSpec,
) -> Callable[[Tensor], Tensor]:
    """Basic indexing of this rank's part."""
    box = source.local_box
    index: list[Any] = []
    dim = 0
    for item in items:
        if item is None:
            index.append(None)
            continue
        if isinstance(item, int):
            index.append(item)
        elif dim in changed:
            index.append(taken(*spans[dim], box.offsets[dim], box.sizes[dim]))
        else:
            index.append(slice(None))
        dim += 1
    local = tuple(index)
    return lambda x: x[local]


def whole_dims(tensor: DTensor, dims: Sequence[int]) -> DTensor:
    """The same with these dims whole on each rank. Collective; differentiable."""
    spec = tensor._spec
    return tensor.redistribute(placements=unsharded(spec, dims).placements, order=spec.order)


def indexed(input: DTensorArg, items: Sequence[Item]) -> RuleResult:
    """Any basic indexing, where a call's arguments are the tensor and the index."""
    if any(isinstance(item, int) and input.is_sharded(dim) for dim, item in _by_dim(items)):
        return Decomposition(_two_steps)
    return sliced(input, items)


def _two_steps(input: DTensor, index: Any) -> Tensor:
    """Elements of cut dims: they stay where they are at first, then all ranks get them."""
    items = basic(index, input.shape)
    assert items is not None
    single = [
        dim for dim, item in _by_dim(items) if isinstance(item, int) and input._spec.axes_of(dim)
    ]
    first, then = _all(input.dim()), list(items)
    for place, (dim, item) in zip(_places(items), _by_dim(items), strict=True):
        if isinstance(item, slice):
            first[dim], then[place] = item, slice(None)
        elif isinstance(item, int) and dim in single:
            at = item % input.shape[dim]
            first[dim], then[place] = slice(at, at + 1), 0
    part = input[tuple(first)]
    assert isinstance(part, DTensor)
    found: DTensor = whole_dims(part, single)[tuple(then)]  # type: ignore[assignment]
    copied_views.mark(
        found, input, lambda x: x[index], lambda x, value: x.__setitem__(index, value)
    )
    return found


def _places(items: Sequence[Item]) -> list[int]:
    """Where in an index the items are that stand for a dim."""
    return [place for place, item in enumerate(items) if item is not None]


def basic(index: Any, shape: Sequence[int]) -> list[Item] | None:
    """What each dim's item is; None if this is not basic indexing, or does not fit the shape."""
    given = list(index) if isinstance(index, tuple) else [index]
    count = sum(item is not None and item is not Ellipsis for item in given)
    if count > len(shape) or sum(item is Ellipsis for item in given) > 1:
        return None
    if not any(item is Ellipsis for item in given):
        given.append(Ellipsis)
    at = next(i for i, item in enumerate(given) if item is Ellipsis)
    given[at : at + 1] = [slice(None)] * (len(shape) - count)
    items: list[Item] = []
    dim = 0
    for item in given:
        if item is None:
            items.append(None)
            continue
        known = _item(item, shape[dim])
        if known is None:
            return None
        items.append(known)
        dim += 1
    return items


def _item(item: Any, size: int) -> Item:
    """A range or an element of a dim; None for what is neither."""
    if isinstance(item, slice):
        step = 1 if item.step is None else operator.index(item.step)
        return slice(*slice(item.start, item.stop, item.step).indices(size)) if step > 0 else None
    if isinstance(item, bool) or not hasattr(type(item), "__index__") or isinstance(item, Arg):
        return None
    if isinstance(item, Tensor) or not -size <= operator.index(item) < size:
        return None
    return operator.index(item)


# -- rules -----------------------------------------------------------------------------------


def _one(dim: int, items: Sequence[Any], item: Any) -> list[Any]:
    """The items with another one for ``dim``."""
    found = list(items)
    found[dim] = item
    return found


def _all(ndim: int) -> list[Any]:
    """Of each dim everything."""
    return [slice(None)] * ndim


@rule("narrow", is_view=True)
def _narrow(input: DTensorArg, dim: int, start: Any, length: int) -> RuleResult:
    if isinstance(start, Arg):
        if start.dtype.is_floating_point or start.ndim:
            return None
        return Decomposition(
            lambda input, dim, start, length: input.narrow(dim, int(start.item()), length)
        )
    size = input.shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        return None
    return sliced(input, _one(dim, _all(input.ndim), slice(start, start + length, 1)))


@rule("select", is_view=True)
def _select(input: DTensorArg, dim: int, index: Any) -> RuleResult:
    if isinstance(index, Arg):
        return Decomposition(lambda input, dim, index: input.select(dim, int(index.item())))
    if not -input.shape[dim] <= index < input.shape[dim]:
        return None
    if input.is_sharded(dim):
        return Decomposition(
            lambda input, dim, index: input[
                tuple(_one(dim, _all(input.dim()), operator.index(index)))
            ]
        )
    return sliced(input, _one(dim, _all(input.ndim), index))


def _pieces(name: str, dim_of: Callable[..., int], is_view: bool = True) -> None:
    """Register the rule of an operator that takes a dim apart.

    Args:
        name: The operator.
        dim_of: Called with the number of dims and the operator's other arguments; which dim it is.
        is_view: As for :class:`~tilework.tiled.op_table.OpEntry`.
    """
    whole_one = getattr(torch.Tensor, name)

    def answer(input: DTensorArg, *args: Any, **kwargs: Any) -> RuleResult:
        if any(isinstance(one, Arg) for one in (*args, *kwargs.values())):
            return Decomposition(_with_lists(whole_one))
        shown = torch.empty(input.shape, device="meta")
        try:
            dim = dim_of(input.ndim, *args, **kwargs) % input.ndim
            lengths = [piece.shape[dim] for piece in whole_one(shown, *args, **kwargs)]
        except (RuntimeError, IndexError, ZeroDivisionError):  # told by torch when it is run
            return None
        if not input.spec.axes_of(dim):
            return _apart(input, dim, lengths)
        return Decomposition(lambda input, *_, **__: _narrowed(input, dim, lengths))

    rule(name, is_view=is_view)(answer)


def _with_lists(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, with lists in place of tensors that tell it where to cut."""

    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.tolist()

    def compute(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {name: told(value) for name, value in kwargs.items()}
        return operator(input, *map(told, args), **named)

    return compute


def _narrowed(input: Tensor, dim: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Consecutive ranges of a dim."""
    found, start = [], 0
    for one in lengths:
        found.append(input.narrow(dim, start, one))
        start += one
    return tuple(found)


def _apart(input: DTensorArg, dim: int, lengths: Sequence[int]) -> RuleResult:
    """Pieces of a dim that each rank has whole."""
    factors = [Factor(size) for size in input.shape]
    outputs = [_one(dim, factors, Factor(one, unshardable=True)) for one in lengths]
    return local_call(
        {input: _one(dim, factors, Factor(input.shape[dim], unshardable=True))},
        outputs,
        rearranges=True,
    )


for _name in ("split", "split_with_sizes", "chunk", "tensor_split"):
    _pieces(_name, lambda ndim, *how, dim=0, **_: how[1] if len(how) > 1 else dim)
for _name in ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"):
    _pieces(_name, lambda ndim, *how, dim=0, **_: how[1] if len(how) > 1 else dim, is_view=False)
_pieces("hsplit", lambda ndim, *_, **__: 0 if ndim == 1 else 1)
_pieces("vsplit", lambda ndim, *_, **__: 0)
_pieces("dsplit", lambda ndim, *_, **__: 2)


@rule("unbind", is_view=True)
def _unbind(input: DTensorArg, dim: int = 0) -> RuleResult:
    dim = dim_at(dim, input.ndim)
    factors = [Factor(size) for size in input.shape]
    kept = factors[:dim] + factors[dim + 1 :]
    return local_call(
        {input: _one(dim, factors, Factor(input.shape[dim], unshardable=True))},
        [kept] * input.shape[dim],
        rearranges=True,
    )


# -- copies of views -------------------------------------------------------------------------


def _copied(name: str) -> None:
    """Register the rule of the operator that copies what a view shows."""
    view: Any = getattr(Tensor, name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        made = view(*args, **kwargs)
        return made.clone() if isinstance(made, Tensor) else tuple([one.clone() for one in made])

    rule(f"{name}_copy")(lambda *_, **__: Decomposition(compute))


for _name in (
    *("narrow", "select", "split", "split_with_sizes", "unbind", "diagonal", "expand", "permute"),
    *("squeeze", "unsqueeze", "t", "transpose", "unfold", "view"),
):
    _copied(_name)
