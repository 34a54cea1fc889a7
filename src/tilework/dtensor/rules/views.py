"""Operators that put tensors together, or move, repeat and drop elements: cat, pad, roll."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor.propagation.placed_call import DTensorArg, PlacedCall
from tilework.dtensor.rules.reshaping import atleast_1d, atleast_2d, atleast_3d, dim_at, sizes_of
from tilework.dtensor.rules.slicing import measure
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.resize_shards import Resize, resizable, resized, shard_number, unsharded
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.tiled.factors import Dim, Factor
from tilework.tiled.op_rules import Arg, Decomposition, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule

# -- putting together ------------------------------------------------------------------------


def _joined_shape(tensors: Sequence[Any], dim: int) -> list[int]:
    """The shape of tensors one after the other."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return shape


@rule("cat")
def _cat(tensors: Sequence[DTensorArg], dim: int = 0, **_: Any) -> RuleResult:
    first = tensors[0]
    if not all(isinstance(one, Arg) and one.ndim == first.ndim > 0 for one in tensors):
        return None  # among them a tensor without elements and dims, which torch lets pass
    dim = dim_at(dim, first.ndim)
    if any(one.shape[:dim] != first.shape[:dim] for one in tensors) or any(
        one.shape[dim + 1 :] != first.shape[dim + 1 :] for one in tensors
    ):
        return None
    if any(one.is_sharded(dim) for one in tensors):
        return _cat_cut(tensors, dim)
    factors = [Factor(size) for size in first.shape]
    dims: dict[Arg, list[Factor]] = {}
    for one in tensors:
        dims[one] = list(factors)
        dims[one][dim] = Factor(one.shape[dim], unshardable=True)
    shape = _joined_shape(tensors, dim)
    out = list(factors)
    out[dim] = Factor(shape[dim], unshardable=True)
    return local_call(dims, [out], rearranges=True, shapes=[tuple(shape)])


def _cat_cut(tensors: Sequence[DTensorArg], dim: int) -> RuleResult:
    """Each element goes where it belongs in a result that is cut as the first cut tensor is."""
    shape = _joined_shape(tensors, dim)
    target = _cut_anew(tensors, shape, dim)
    ends = [*itertools.accumulate(one.shape[dim] for one in tensors)]
    starts = [0, *ends[:-1]]
    while True:
        ways = [
            resizable(target, {dim: measure(start, end, 1)})
            for start, end in zip(starts, ends, strict=True)
        ]
        narrower = min((way[0] for way in ways), key=lambda spec: len(spec.axes_of(dim)))
        if narrower == target:
            break
        target = narrower  # one axis less cuts the dim
    dims = {i: i for i in range(len(shape))}
    inputs = [
        resized(target, one.shape, dims, sizes)
        for one, (_, sizes) in zip(tensors, ways, strict=True)
    ]
    return PlacedCall(inputs, [target], lambda *parts: torch.cat(parts, dim))


def _cut_anew(tensors: Sequence[DTensorArg], shape: Sequence[int], dim: int) -> DTensorSpec:
    """The layout of the first tensor that is cut along ``dim``, for another size of it."""
    spec = next(one.spec for one in tensors if one.is_sharded(dim))
    placements: list[Placement] = []
    for axis, one in enumerate(spec.placements):
        if isinstance(one, Shard) and one.dim == dim:
            one = Shard(dim)
        elif isinstance(one, Partial) and any(
            other.spec.placements[axis] != one for other in tensors
        ):
            one = Replicate()
        placements.append(one)
    return spec_of(spec.mesh, placements, shape, spec.order)


@rule("stack")
def _stack(tensors: Sequence[Arg], dim: int = 0, **_: Any) -> RuleResult:
    first = tensors[0]
    if any(one.shape != first.shape for one in tensors):
        return None
    dim = dim_at(dim, first.ndim + 1)
    factors = [Factor(size) for size in first.shape]
    new = Factor(len(tensors), unshardable=True)
    return local_call(
        dict.fromkeys(tensors, factors), [[*factors[:dim], new, *factors[dim:]]], rearranges=True
    )


def _composed(compute: Callable[..., Any]) -> Callable[..., RuleResult]:
    """The rule of an operator that others make up."""
    return lambda *_, **__: Decomposition(compute)


def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(map(atleast_1d, tensors))
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors], 1)


def _block_diag(*tensors: Any) -> Tensor:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    blocks = list(map(atleast_2d, given))
    width = sum(one.shape[1] for one in blocks)
    rows, left = [], 0
    for one in blocks:
        rows.append(F.pad(one, (left, width - left - one.shape[1])))
        left += one.shape[1]
    return torch.cat(rows, 0)


def _kron(input: Tensor, other: Tensor) -> Tensor:
    ndim = max(input.dim(), other.dim())
    a = input.reshape((1,) * (ndim - input.dim()) + tuple(input.shape))
    b = other.reshape((1,) * (ndim - other.dim()) + tuple(other.shape))
    shape = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    for dim in range(ndim):
        a, b = a.unsqueeze(2 * dim + 1), b.unsqueeze(2 * dim)
    return (a * b).reshape(shape)


def _cartesian_prod(*tensors: Any) -> Tensor:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    if len(given) == 1:
        return given[0]  # type: ignore[no-any-return]
    grid = torch.meshgrid(*given, indexing="ij")
    return torch.stack([one.reshape(-1) for one in grid], 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    places = torch.combinations(torch.arange(input.shape[0]), r, with_replacement)
    return input[places]


rule("hstack")(_composed(_hstack))
rule("vstack")(_composed(lambda tensors: torch.cat([atleast_2d(x) for x in tensors], 0)))
rule("dstack")(_composed(lambda tensors: torch.cat([atleast_3d(x) for x in tensors], 2)))
rule("column_stack")(_composed(_column_stack))
rule("block_diag")(_composed(_block_diag))
rule("kron")(_composed(_kron))
rule("cartesian_prod")(_composed(_cartesian_prod))
rule("combinations")(_composed(_combinations))


@rule("meshgrid")
def _meshgrid(*tensors: Any, indexing: str | None = None) -> RuleResult:
    given: Sequence[Arg] = tensors if isinstance(tensors[0], Arg) else tensors[0]
    factors = [Factor(math.prod(one.shape)) for one in given]
    out = list(factors)
    if indexing == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    dims = {one: [factor] * one.ndim for one, factor in zip(given, factors, strict=True)}
    # Without a word on indexing torch warns; it is said here once, where the rule is asked.
    how = indexing or "ij"
    return local_call(
        dims, [out] * len(given), run=lambda _: lambda *parts: torch.meshgrid(*parts, indexing=how)
    )


# -- repeating -------------------------------------------------------------------------------


@rule("repeat")
def _repeat(input: Arg, *repeats: Any, **named: Any) -> RuleResult:
    counts = sizes_of(repeats or tuple(named.values()) or ((),))
    return _repeated(input, counts) if len(counts) >= input.ndim else None


@rule("tile")
def _tile(input: Arg, *dims: Any, **named: Any) -> RuleResult:
    counts = sizes_of(dims or tuple(named.values()) or ((),))
    return _repeated(input, (1,) * (input.ndim - len(counts)) + counts)


def _repeated(input: Arg, counts: Sequence[int]) -> RuleResult:
    """Copies of a tensor beside each other: dims that are repeated have to be whole."""
    new = len(counts) - input.ndim
    dims = [
        Factor(size, unshardable=count != 1)
        for size, count in zip(input.shape, counts[new:], strict=True)
    ]
    out: list[Dim] = [(Factor(count, unshardable=True),) for count in counts[:new]]
    for factor, count in zip(dims, counts[new:], strict=True):
        out.append((factor,) if count == 1 else (Factor(count, unshardable=True), factor))
    return local_call(
        {input: dims}, [out], rearranges=True, run=lambda _: lambda x: x.repeat(counts)
    )


@rule("repeat_interleave")
def _repeat_interleave(input: Arg, repeats: Any = None, dim: Any = None, **_: Any) -> RuleResult:
    if not isinstance(repeats, int):
        return None if repeats is None else Decomposition(_repeat_each)
    if dim is None:
        return Decomposition(
            lambda input, repeats, dim=None, **_: input.flatten().repeat_interleave(repeats, 0)
        )
    factors = [Factor(size) for size in input.shape]
    out: list[Factor | Dim | None] = list(factors)
    out[dim] = (factors[dim], Factor(repeats, unshardable=True))
    run = lambda _: lambda x: x.repeat_interleave(repeats, dim)  # noqa: E731
    return local_call({input: factors}, [out], rearranges=True, run=run)


def _repeat_each(input: Tensor, repeats: Tensor, dim: int | None = None, **_: Any) -> Tensor:
    """Elements of a dim, each as often as ``repeats`` says."""
    if dim is None:
        input, dim = input.flatten(), 0
    counts = repeats.full_tensor() if isinstance(repeats, DTensor) else repeats
    places = torch.arange(input.shape[dim]).repeat_interleave(counts.expand(input.shape[dim]))
    return input.index_select(dim, places)


# -- moving and dropping ---------------------------------------------------------------------


@rule("flip")
def _flip(input: Arg, *dims: Any, **named: Any) -> RuleResult:
    turned = {dim_at(dim, input.ndim) for dim in sizes_of(dims or tuple(named.values()))}
    factors = [Factor(size, unshardable=i in turned) for i, size in enumerate(input.shape)]
    return local_call({input: factors}, [factors], rearranges=True)


rule("fliplr")(_composed(lambda input: input.flip(1)))


@rule("flipud")
def _flipud(input: Arg) -> RuleResult:
    return Decomposition(lambda input: input.flip(0)) if input.ndim else None


@rule("roll")
def _roll(input: Arg, shifts: Any, dims: Any = None) -> RuleResult:
    if dims is None or dims == () or dims == []:
        if not isinstance(shifts, int) and len(shifts) != 1:
            return None
        return Decomposition(
            lambda input, shifts, dims=None: input.flatten().roll(shifts, 0).view(input.shape)
        )
    turned = [
        dim_at(dim, input.ndim)
        for dim in sizes_of((dims,) if isinstance(dims, int) else (tuple(dims),))
    ]
    if any(input.is_sharded(dim) for dim in turned if input.ndim):
        return Decomposition(_roll_cut)
    factors = [Factor(size, unshardable=i in turned) for i, size in enumerate(input.shape)]
    return local_call({input: factors}, [factors], rearranges=True)


def _roll_cut(input: Tensor, shifts: Any, dims: Any) -> Tensor:
    """What passes the end of a cut dim goes before its start."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for shift, dim in zip(shifts, dims, strict=True):
        size = input.shape[dim]
        if size and shift % size:
            last = shift % size
            parts = [input.narrow(dim, size - last, last), input.narrow(dim, 0, size - last)]
            input = torch.cat(parts, dim)
        else:
            input = input.clone()
    return input


def _triangle(name: str) -> None:
    whole_one = getattr(torch, name)

    def answer(input: Arg, diagonal: int = 0) -> RuleResult:
        factors = [Factor(size) for size in input.shape]

        def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
            row, column = (ranges.local_range(factor)[0] for factor in factors[-2:])
            here = diagonal + row - column
            return lambda x: whole_one(x, here)

        return local_call({input: factors}, [factors], rearranges=True, run=make)

    rule(name)(answer)


_triangle("tril")
_triangle("triu")


@rule("diagonal", is_view=True)
def _diagonal(
    input: DTensorArg, offset: Any = 0, dim1: int = 0, dim2: int = 1, **_: Any
) -> RuleResult:
    dim1, dim2 = dim_at(dim1, input.ndim), dim_at(dim2, input.ndim)
    if not isinstance(offset, int) or dim1 == dim2:
        return None
    rows, columns = input.shape[dim1], input.shape[dim2]
    start, stop = max(0, -offset), max(min(rows, columns - offset), max(0, -offset))
    # Elements stay where they are along one of the two dims; the other one has to be whole.
    along, other = (
        (dim1, dim2) if input.is_sharded(dim1) or not input.is_sharded(dim2) else (dim2, dim1)
    )
    shift = 0 if along == dim1 else offset
    source, sizes = resizable(
        unsharded(input.spec, [other]), {along: measure(start + shift, stop + shift, 1)}
    )
    kept = [dim for dim in range(input.ndim) if dim not in (dim1, dim2)]
    dims = {dim: i for i, dim in enumerate(kept)} | {along: len(kept)}
    shape = [*(input.shape[dim] for dim in kept), stop - start]
    row, column = source.local_box.offsets[dim1], source.local_box.offsets[dim2]
    here = offset + row - column
    out = resized(source, shape, dims, sizes)
    return PlacedCall([source], [out], lambda x: x.diagonal(here, dim1, dim2))


@rule("diag")
def _diag(input: Arg, diagonal: int = 0) -> RuleResult:
    if input.ndim == 1:
        return Decomposition(lambda input, diagonal=0: torch.diag_embed(input, diagonal))
    if input.ndim == 2:
        return Decomposition(lambda input, diagonal=0: input.diagonal(diagonal).clone())
    return None


rule("diagflat")(_composed(lambda input, offset=0: torch.diag(input.flatten(), offset)))


@rule("diag_embed")
def _diag_embed(input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> RuleResult:
    dim1, dim2 = sorted((dim_at(dim1, input.ndim + 1), dim_at(dim2, input.ndim + 1)))
    rest = [Factor(size) for size in input.shape[:-1]]
    side = Factor(input.shape[-1] + abs(offset), unshardable=True)
    out: list[Factor] = list(rest)
    out.insert(dim1, side)
    out.insert(dim2, Factor(side.size, unshardable=True))
    last = Factor(input.shape[-1], unshardable=True)
    return local_call({input: [*rest, last]}, [out], rearranges=True)


# By the function: nn.functional's of that name is another operator.
@rule(torch.Tensor.unfold, is_view=True)
def _unfold(input: Arg, dimension: int, size: int, step: int) -> RuleResult:
    factors = [Factor(one) for one in input.shape]
    dims = list(factors)
    if input.ndim:
        dims[dimension] = Factor(input.shape[dimension], unshardable=True)
    out: list[Factor] = list(factors)
    if input.ndim:
        count = (input.shape[dimension] - size) // step + 1
        out[dimension] = Factor(max(count, 0), unshardable=True)
    return local_call({input: dims}, [[*out, Factor(size, unshardable=True)]], rearranges=True)


# -- padding ---------------------------------------------------------------------------------


@rule("pad")
def _pad(input: DTensorArg, pad: Any, mode: str = "constant", value: Any = None) -> RuleResult:
    widths = sizes_of((pad,))
    if len(widths) % 2 or len(widths) > 2 * input.ndim or isinstance(value, Arg):
        return None
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    by_dim = {input.ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}
    if mode == "constant":
        if any(min(pair) < 0 for pair in by_dim.values()):
            return Decomposition(_cropped)
        return _padded(input, by_dim, value or 0)
    # Elements are repeated at the ends, so each rank has to have padded dims whole.
    factors = [Factor(size, unshardable=dim in by_dim) for dim, size in enumerate(input.shape)]
    out = [
        Factor(factor.size + sum(by_dim[dim]), unshardable=True) if dim in by_dim else factor
        for dim, factor in enumerate(factors)
    ]

    def run(x: Tensor) -> Tensor:
        # torch pads nothing without elements otherwise.
        return F.pad(x, widths, mode) if x.numel() else F.pad(x, widths)

    return local_call({input: factors}, [out], rearranges=True, run=lambda _: run)


@rule("constant_pad_nd")
def _constant_pad(input: Arg, pad: Any, value: Any = 0) -> RuleResult:
    return Decomposition(lambda input, pad, value=0: F.pad(input, tuple(pad), "constant", value))


def _padded(input: DTensorArg, by_dim: dict[int, tuple[int, int]], value: Any) -> RuleResult:
    """Elements put before the first part of a dim and after the last one."""
    spec = input.spec
    if value != 0:
        spec = spec.dual
    measures = {dim: _wider(*pair) for dim, pair in by_dim.items() if spec.axes_of(dim)}
    source, sizes = resizable(spec, measures)
    here: list[int] = []
    for dim in reversed(range(input.ndim)):
        before, after = by_dim.get(dim, (0, 0))
        place, count = shard_number(source, dim)
        here += [before if place == 0 else 0, after if place == count - 1 else 0]
    shape = [size + sum(by_dim.get(dim, (0, 0))) for dim, size in enumerate(input.shape)]
    out = resized(source, shape, {i: i for i in range(input.ndim)}, sizes)
    return PlacedCall([source], [out], lambda x: F.pad(x, here, "constant", value))


def _wider(before: int, after: int) -> Resize:
    def measured(parts: Sequence[tuple[int, int]]) -> list[int]:
        sizes = [size for _, size in parts]
        sizes[0] += before
        sizes[-1] += after
        return sizes

    return measured


def _cropped(input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Padding of which some is negative: elements are dropped there first."""
    index: list[Any] = [slice(None)] * input.dim()
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = input.dim() - 1 - i
        stop = input.shape[dim] - max(-after, 0)
        index[dim] = slice(max(-before, 0), max(stop, max(-before, 0)))
    rest = [max(width, 0) for width in pad]
    return F.pad(input[tuple(index)], rest, mode, value)
