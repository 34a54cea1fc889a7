"""Operators that only rearrange elements: cat, stack, repeat, flip, roll, tril, diag, unfold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.tiled.factors import Dim, Factor
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    RuleResult,
    composed,
    local_call,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.reshaping import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    dim_at,
    one_by_one,
    sizes_of,
)


def cat_shape(tensors: Sequence[Any], dim: int) -> tuple[int, ...]:
    """The shape of tensors that are concatenated."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tuple(shape)


def cat_dim(tensors: Sequence[Any], dim: int) -> int | None:
    """The dim of a concatenation; None if the tensors do not fit together."""
    first = tensors[0]
    if not all(isinstance(arg, Arg) and arg.ndim == first.ndim > 0 for arg in tensors):
        return None
    dim = dim_at(dim, first.ndim)
    others = [(*arg.shape[:dim], *arg.shape[dim + 1 :]) for arg in tensors]
    return dim if all(shape == others[0] for shape in others) else None


def cat_of_legacy(tensors: Sequence[Any]) -> RuleResult:
    """The concatenation without tensors of shape [0], with which caches of keys begin."""
    kept = [not isinstance(arg, Arg) or arg.shape != (0,) for arg in tensors]
    if all(kept) or not any(kept) or not all(isinstance(arg, Arg) for arg in tensors):
        return None
    first = tensors[kept.index(True)]
    if all(arg.ndim == 1 for arg in tensors):
        return None  # one dim each: these are without elements, too
    dtypes = [arg.dtype for arg in tensors]
    dtype = functools.reduce(torch.promote_types, dtypes)

    def run(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Tensor:
        none = [0 if at == dim % first.ndim else size for at, size in enumerate(first.shape)]
        others = [
            tensor if keep else tensor.reshape(none)
            for tensor, keep in zip(tensors, kept, strict=True)
            if keep or tensor.requires_grad  # then the result requires one, too
        ]
        return torch.cat(others, dim).to(dtype)

    return Decomposition(run)


@rule("cat")
def _cat(tensors: Sequence[Arg], dim: int = 0, **_: Any) -> RuleResult:
    along = cat_dim(tensors, dim)
    if along is None:
        return cat_of_legacy(tensors)
    factors = [Factor(size) for size in tensors[0].shape]
    dims: dict[Arg, list[Factor]] = {}
    for arg in tensors:
        dims[arg] = list(factors)
        dims[arg][along] = Factor(arg.shape[along], unshardable=True)
    shape = cat_shape(tensors, along)
    out = list(factors)
    out[along] = Factor(shape[along], unshardable=True)
    return local_call(dims, [out], rearranges=True, shapes=[shape])


@rule("stack")
def _stack(tensors: Sequence[Arg], dim: int = 0, **_: Any) -> RuleResult:
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        return None
    dim = dim_at(dim, first.ndim + 1)
    factors = [Factor(size) for size in first.shape]
    new = Factor(len(tensors), unshardable=True)
    return local_call(
        dict.fromkeys(tensors, factors), [[*factors[:dim], new, *factors[dim:]]], rearranges=True
    )


@rule("hstack")
@composed
def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(map(atleast_1d, tensors))
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


rule("vstack")(composed(lambda tensors: torch.cat([atleast_2d(x) for x in tensors], 0)))
rule("dstack")(composed(lambda tensors: torch.cat([atleast_3d(x) for x in tensors], 2)))


@rule("column_stack")
@composed
def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors], 1)


@rule("block_diag")
@composed
def _block_diag(*tensors: Any) -> Tensor:
    blocks = list(map(atleast_2d, one_by_one(tensors)))
    for at, block in enumerate(blocks):
        if block.dim() > 2:
            raise RuntimeError(
                f"block_diag takes tensors of up to 2 dims, but tensor {at} has the shape "
                f"{list(block.shape)}: reshape it to 2 dims first"
            )
    width = sum(block.shape[1] for block in blocks)
    rows, left = [], 0
    for block in blocks:
        rows.append(F.pad(block, (left, width - left - block.shape[1])))
        left += block.shape[1]
    return torch.cat(rows, 0)


@rule("kron")
@composed
def _kron(input: Tensor, other: Tensor) -> Tensor:
    ndim = max(input.dim(), other.dim())
    a = input.reshape((1,) * (ndim - input.dim()) + tuple(input.shape))
    b = other.reshape((1,) * (ndim - other.dim()) + tuple(other.shape))
    shape = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    for dim in range(ndim):
        a, b = a.unsqueeze(2 * dim + 1), b.unsqueeze(2 * dim)
    return (a * b).reshape(shape)


@rule("cartesian_prod")
@composed
def _cartesian_prod(*tensors: Any) -> Tensor:
    given = one_by_one(tensors)
    if len(given) == 1:
        return given[0]  # type: ignore[no-any-return]
    grid = torch.meshgrid(*given, indexing="ij")
    return torch.stack([coordinate.reshape(-1) for coordinate in grid], 1)


@rule("combinations")
@composed
def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    places = torch.arange(input.shape[0], device=input.device)
    return input[torch.combinations(places, r, with_replacement)]


@rule("meshgrid")
def _meshgrid(*tensors: Any, indexing: str | None = None) -> RuleResult:
    given: Sequence[Arg] = one_by_one(tensors)
    alike = len({arg.dtype for arg in given if isinstance(arg, Arg)}) == 1
    if not alike or any(arg.ndim > 1 for arg in given) or indexing not in (None, "ij", "xy"):
        return None  # torch raises where it is run
    # torch warns without an indexing; here the rule warns once, not each call.
    return Decomposition(_grid_xy if indexing == "xy" and len(given) > 1 else _grid)


def _grid(*tensors: Any, **_: Any) -> tuple[Tensor, ...]:
    given = one_by_one(tensors)
    shape = [x.numel() for x in given]
    return tuple([
        x.view([x.numel() if at == dim else 1 for at in range(len(given))]).expand(shape)
        for dim, x in enumerate(given)
    ])  # fmt: skip


def _grid_xy(*tensors: Any, **_: Any) -> tuple[Tensor, ...]:
    first, second, *rest = one_by_one(tensors)
    rows, columns, *others = _grid(second, first, *rest)
    return columns, rows, *others


# -- repeating -------------------------------------------------------------------------------


@rule("repeat")
def _repeat(input: Arg, *repeats: Any, **named: Any) -> RuleResult:
    counts = sizes_of(repeats or tuple(named.values()) or ((),))
    return _repetition(input, counts) if len(counts) >= input.ndim else None


@rule("tile")
def _tile(input: Arg, *dims: Any, **named: Any) -> RuleResult:
    counts = sizes_of(dims or tuple(named.values()) or ((),))
    return _repetition(input, (1,) * (input.ndim - len(counts)) + counts)


def _repetition(input: Arg, counts: Sequence[int]) -> RuleResult:
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
        return None
    if dim is None:
        return Decomposition(
            lambda input, repeats, dim=None, **_: input.flatten().repeat_interleave(repeats, 0)
        )
    factors = [Factor(size) for size in input.shape]
    out: list[Factor | Dim | None] = list(factors)
    out[dim] = (factors[dim], Factor(repeats, unshardable=True))
    run = lambda _: lambda x: x.repeat_interleave(repeats, dim)  # noqa: E731
    return local_call({input: factors}, [out], rearranges=True, run=run)


# -- moving and dropping ---------------------------------------------------------------------


@rule("flip")
def _flip(input: Arg, *dims: Any, **named: Any) -> RuleResult:
    turned = [dim_at(dim, input.ndim) for dim in sizes_of(dims or tuple(named.values()))]
    if len(set(turned)) != len(turned):
        return None  # torch refuses them
    factors = [Factor(size, unshardable=i in turned) for i, size in enumerate(input.shape)]
    return local_call({input: factors}, [factors], rearranges=True)


rule("fliplr")(composed(lambda input: input.flip(1)))


@rule("flipud")
def _flipud(input: Arg) -> RuleResult:
    return Decomposition(lambda input: input.flip(0)) if input.ndim else None


@rule("roll")
def _roll(input: Arg, shifts: Any, dims: Any = None) -> RuleResult:
    if 0 in input.shape:  # then torch does not look at dims
        return Decomposition(lambda input, *_, **__: input.clone())
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
    """``roll`` by narrow and cat, which run on sharded dims: last elements go to the front."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for shift, dim in zip(shifts, dims, strict=True):
        size = input.shape[dim]
        if size and shift % size:
            last = shift % size
            ends = [input.narrow(dim, size - last, last), input.narrow(dim, 0, size - last)]
            input = torch.cat(ends, dim)
        else:
            input = input.clone()
    return input


def _triangle(name: str) -> None:
    whole_one = getattr(torch, name)

    def answer(input: Arg, diagonal: int = 0) -> RuleResult:
        if input.ndim < 2:
            return None
        factors = [Factor(size) for size in input.shape]

        def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
            row, column = (ranges.local_range(factor)[0] for factor in factors[-2:])
            here = diagonal + row - column
            return lambda x: whole_one(x, here)

        return local_call({input: factors}, [factors], rearranges=True, run=make)

    rule(name)(answer)


_triangle("tril")
_triangle("triu")


# -- diagonals -------------------------------------------------------------------------------


@rule("diag")
def _diag(input: Arg, diagonal: int = 0) -> RuleResult:
    if input.ndim == 1:
        return Decomposition(lambda input, diagonal=0: torch.diag_embed(input, diagonal))
    if input.ndim == 2:
        return Decomposition(lambda input, diagonal=0: input.diagonal(diagonal).clone())
    return None


rule("diagflat")(composed(lambda input, offset=0: torch.diag(input.flatten(), offset)))


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


# Registered by function: nn.functional has another operator of the same name.
@rule(torch.Tensor.unfold, is_view=True)
def _unfold(input: Arg, dimension: int, size: int, step: int) -> RuleResult:
    factors = [Factor(size) for size in input.shape]
    dims = list(factors)
    if input.ndim:
        dims[dimension] = Factor(input.shape[dimension], unshardable=True)
    out: list[Factor] = list(factors)
    if input.ndim:
        count = (input.shape[dimension] - size) // step + 1
        out[dimension] = Factor(max(count, 0), unshardable=True)
    return local_call({input: dims}, [[*out, Factor(size, unshardable=True)]], rearranges=True)


#: The dim that an operator splits, from the number of dims and the other arguments.
DimOf = Callable[..., int]


def _given_dim(ndim: int, *args: Any, dim: int = 0, **_: Any) -> int:
    return int(args[1]) if len(args) > 1 else dim


#: The dim that each operator splits.
SPLITS: Mapping[str, DimOf] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _given_dim),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), _given_dim),
    "hsplit": lambda ndim, *_, **__: 0 if ndim == 1 else 1,
    "vsplit": lambda ndim, *_, **__: 0,
    "dsplit": lambda ndim, *_, **__: 2,
}


def split_lengths(
    name: str, input: Arg, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[int]] | None:
    """The dim that a call splits, and the lengths of the parts; None if torch refuses it."""
    on_meta = torch.empty(input.shape, device="meta")
    try:
        dim = SPLITS[name](input.ndim, *args, **kwargs) % input.ndim
        results = getattr(Tensor, name)(on_meta, *args, **kwargs)
        return dim, [result.shape[dim] for result in results]
    except (RuntimeError, IndexError, ZeroDivisionError):  # raised by torch when it is run
        return None


def with_item(items: Sequence[Any], at: int, item: Any) -> list[Any]:
    """A copy of ``items`` with ``item`` at the index ``at``."""
    items = list(items)
    items[at] = item
    return items


def _register(name: str) -> None:
    @rule(name, is_view=not name.startswith("unsafe_"))
    def split_rule(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        if any(isinstance(arg, Arg) for arg in (*args, *kwargs.values())):
            return None
        split = split_lengths(name, input, args, kwargs)
        if split is None:
            return None
        dim, lengths = split
        factors = [Factor(size) for size in input.shape]
        before = with_item(factors, dim, Factor(input.shape[dim], unshardable=True))
        outputs = [with_item(factors, dim, Factor(length, unshardable=True)) for length in lengths]
        return local_call({input: before}, outputs, rearranges=True)


for _name in SPLITS:
    _register(_name)


@rule("unbind", is_view=True)
def _unbind(input: Arg, dim: int = 0) -> RuleResult:
    dim = dim_at(dim, input.ndim)
    factors = [Factor(size) for size in input.shape]
    return local_call(
        {input: with_item(factors, dim, Factor(input.shape[dim], unshardable=True))},
        [factors[:dim] + factors[dim + 1 :]] * input.shape[dim],
        rearranges=True,
    )


# -- copies of views -------------------------------------------------------------------------


def _copied(name: str) -> None:
    view: Any = _view_or_copy if name == "view" else getattr(Tensor, name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        return result.clone() if isinstance(result, Tensor) else tuple([x.clone() for x in result])

    rule(f"{name}_copy")(composed(compute))


def _view_or_copy(tensor: Tensor, size: Any) -> Tensor:
    return tensor.view(size) if isinstance(size, torch.dtype) else tensor.reshape(size)


for _name in (
    *("narrow", "select", "split", "split_with_sizes", "unbind", "diagonal", "expand", "permute"),
    *("squeeze", "unsqueeze", "t", "transpose", "unfold", "view"),
):
    _copied(_name)
