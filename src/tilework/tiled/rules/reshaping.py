"""Operators that split, merge and reorder dims: view, reshape, flatten, squeeze, permute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.layout.internal import Ints
from tilework.tiled.factors import Dim, Factor, broadcast_shape
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    RuleResult,
    composed,
    local_call,
)
from tilework.tiled.op_table import register, rule


def regrouped(old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """The factors of the dims of two shapes of one tensor, whose elements keep their order.

    Dims are split and merged from the outermost on, as far as sizes have common factors. A factor
    without a counterpart is unshardable.
    """
    if 0 in old:
        return _without_elements(old, new)
    befores, afters = _Side(old), _Side(new)
    count = 0
    while befores.advance(afters):
        common = math.gcd(befores.rest, afters.rest)
        if common == 1 and befores.rest != afters.rest:
            _take_unshardable(befores, afters)
            continue
        factor = Factor(common, f"d{count}", reduce_op=None)
        count += 1
        befores.take(factor)
        afters.take(factor)
    return befores.dims, afters.dims


class _Side:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.dims: list[Dim] = []
        #: The rest of the size of the current dim; 0 if there is none.
        self.rest = 0
        self._next()

    def _next(self) -> None:
        at = len(self.dims)
        self.rest = self.sizes[at] if at < len(self.sizes) else 0
        if self.rest:
            self.dims.append(())

    def take(self, factor: Factor) -> None:
        self.dims[-1] = (*self.dims[-1], factor)
        self.rest //= factor.size
        if self.rest == 1:
            self._next()

    def advance(self, other: _Side) -> bool:
        """Skip dims of size 1 that the other side lacks; True if any dims are left after that."""
        for one, second in ((self, other), (other, self)):
            while one.rest == 1 and second.rest != 1:
                one._next()
        return self.rest != 0


def _take_unshardable(befores: _Side, afters: _Side) -> None:
    """Take unshardable factors until both sides have the same number of elements."""
    had, gets = _take_rest(befores), _take_rest(afters)
    while had != gets:
        if had < gets:
            had *= _take_rest(befores)
        else:
            gets *= _take_rest(afters)


def _take_rest(side: _Side) -> int:
    size = side.rest
    side.take(Factor(size, "rest", unshardable=True))
    return size


def _without_elements(old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Factors of shapes without elements: equal first dims share them, others are unshardable."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    factors: list[Dim] = [
        (Factor(size, f"d{i}", reduce_op=None),) for i, size in enumerate(old[:same])
    ]
    return (
        factors + [(Factor(size, "rest", unshardable=True),) for size in old[same:]],
        factors + [(Factor(size, "rest", unshardable=True),) for size in new[same:]],
    )


def sizes_of(given: Sequence[Any]) -> Ints:
    """Sizes that were passed one by one, or as one sequence."""
    return tuple(map(int, one_by_one(given)))


def one_by_one(given: Sequence[Any]) -> Sequence[Any]:
    """Arguments that were passed one by one, or as one sequence."""
    return given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given


def dim_at(dim: int, ndim: int) -> int:
    """The number from 0 of a dim; negative numbers count from the last."""
    count = max(ndim, 1)
    if not -count <= dim < count:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], "
            f"but got {dim})"
        )
    return dim % count


def common_shape(*shapes: Sequence[int]) -> Ints:
    """The shape that shapes are broadcast to."""
    return broadcast_shape(shapes)


def infer_sizes(shape: Sequence[int], sizes: Sequence[int]) -> Ints | None:
    """The sizes, with the size that is given as -1 inferred; None if they do not fit the shape."""
    rest = math.prod(size for size in sizes if size != -1)
    total = math.prod(shape)
    if sizes.count(-1) == 1 and rest != 0 and total % rest == 0:
        return tuple(total // rest if size == -1 else size for size in sizes)
    return tuple(sizes) if total == math.prod(sizes) and -1 not in sizes else None


def reshape_call(input: Arg, sizes: Sequence[int], copies: bool = True) -> RuleResult:
    """The call that gives a tensor other dims, with the same elements in the same order.

    With ``copies`` it copies where dims cannot be merged in memory, else it raises as ``view``.
    """
    shape = infer_sizes(input.shape, sizes)
    if shape is None:
        return None
    befores, afters = regrouped(input.shape, shape)

    def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
        local = tuple(map(ranges.local_size, afters))
        # A layout that knows the full tensor's strides has decided if this is a view.
        if copies or hasattr(input.layout, "strides"):
            return lambda x: x.reshape(local)
        return lambda x: x.view(local)

    return local_call({input: befores}, [afters], rearranges=True, run=make, shapes=[shape])


# -- rules -----------------------------------------------------------------------------------


@rule("reshape", is_view=True, may_copy=True)
def _reshape(input: Arg, *shape: Any, **named: Any) -> RuleResult:
    return reshape_call(input, sizes_of(shape or tuple(named.values())))


@rule("view", is_view=True)
@rule("_unsafe_view")
def _view(input: Arg, *shape: Any, **named: Any) -> RuleResult:
    given = shape or tuple(named.values())
    if isinstance(given[0], torch.dtype):
        return _as_dtype(input, given[0])
    return reshape_call(input, sizes_of(given), copies=False)


def _as_dtype(input: Arg, dtype: torch.dtype) -> RuleResult:
    """The view of the bytes as another dtype: elements of the last dim are split or merged."""
    old, new = input.dtype.itemsize, dtype.itemsize
    if not input.ndim or (new > old and input.shape[-1] % (new // old)):
        return None
    smaller, larger = max(old // new, 1), max(new // old, 1)
    dims: list[Dim] = [(Factor(size),) for size in input.shape[:-1]]
    last = Factor(input.shape[-1] // larger)
    before: Dim = (last,) if larger == 1 else (last, Factor(larger, unshardable=True))
    after: Dim = (last,) if smaller == 1 else (last, Factor(smaller, unshardable=True))
    return local_call({input: [*dims, before]}, [[*dims, after]])


def _like_other(method: str) -> Callable[..., RuleResult]:
    return composed(lambda input, other: getattr(input, method)(tuple(other.shape)))


rule("view_as")(_like_other("view"))
rule("reshape_as")(_like_other("reshape"))
rule("expand_as")(_like_other("expand"))


@rule("flatten", is_view=True, may_copy=True)
def _flatten(input: Arg, start_dim: Any = 0, end_dim: Any = -1, *_: Any) -> RuleResult:
    if not isinstance(start_dim, int) or not isinstance(end_dim, int):
        return None  # names
    if not input.ndim:
        return reshape_call(input, (1,))
    start, end = dim_at(start_dim, input.ndim), dim_at(end_dim, input.ndim)
    if start > end:
        return None
    return reshape_call(
        input,
        (*input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :]),
    )


@rule("ravel", is_view=True, may_copy=True)
def _ravel(input: Arg) -> RuleResult:
    return reshape_call(input, (math.prod(input.shape),))


@rule("unflatten", is_view=True)
def _unflatten(input: Arg, dim: Any, sizes: Any, *_: Any) -> RuleResult:
    if not isinstance(dim, int):
        return None  # names
    dim = dim_at(dim, input.ndim)
    new_sizes = infer_sizes(input.shape[dim : dim + 1], sizes_of((sizes,)))
    if new_sizes is None:
        return None
    return reshape_call(
        input, (*input.shape[:dim], *new_sizes, *input.shape[dim + 1 :]), copies=False
    )


@rule("squeeze", is_view=True)
def _squeeze(input: Arg, dim: Any = None) -> RuleResult:
    if dim is None:
        chosen = set(range(input.ndim))
    else:
        dims = dim if isinstance(dim, Sequence) else [dim]
        chosen = {dim_at(at, input.ndim) for at in dims}
    gone = tuple(i for i in sorted(chosen) if i < input.ndim and input.shape[i] == 1)
    factors = [Factor(size, reduce_op=None) for size in input.shape]
    kept = [factor for i, factor in enumerate(factors) if i not in gone]
    # The local tensor may have more dims of size 1.
    return local_call(
        {input: factors}, [kept], rearranges=True, run=lambda _: lambda x: torch.squeeze(x, gone)
    )


@rule("unsqueeze", is_view=True)
def _unsqueeze(input: Arg, dim: int) -> RuleResult:
    dim = dim_at(dim, input.ndim + 1)
    factors: list[Factor | None] = [Factor(size) for size in input.shape]
    return local_call({input: factors}, [[*factors[:dim], None, *factors[dim:]]], rearranges=True)


@rule("expand", "broadcast_to", is_view=True)
def _expand(input: Arg, *size: Any, **named: Any) -> RuleResult:
    named.pop("implicit", None)
    sizes = sizes_of(size or tuple(named.values()))
    more = len(sizes) - input.ndim
    if more < 0:
        return None
    dims: list[Factor | None] = []
    out: list[Factor | None] = [Factor(size) for size in sizes[:more]]
    for old, new in zip(input.shape, sizes[more:], strict=True):
        same = new in (-1, old)
        out.append(Factor(old if same else new, reduce_op=None))
        dims.append(out[-1] if same else None)
    kept = [factor in dims for factor in out]

    def make(ranges: LocalRanges) -> Callable[[Tensor], Tensor]:
        local = [-1 if keep else int(size) for keep, size in zip(kept, sizes, strict=True)]
        return lambda x: x.expand(local)

    return local_call({input: dims}, [out], rearranges=True, run=make)


@rule("broadcast_tensors")
def _broadcast_tensors(*tensors: Any) -> RuleResult:
    def compute(*tensors: Any) -> tuple[Tensor, ...]:
        given = one_by_one(tensors)
        shape = common_shape(*[tensor.shape for tensor in given])
        # torch returns a tensor that already has the shape unchanged.
        return tuple([x if x.shape == shape else x.expand(shape) for x in given])

    try:
        common_shape(*[tensor.shape for tensor in one_by_one(tensors)])
    except ValueError as error:
        raise RuntimeError(f"broadcast_tensors: {error}") from None
    return Decomposition(compute)


for _name in ("as_strided", "alias"):
    register(_name, is_view=True)


# -- permutations ----------------------------------------------------------------------------

#: The argument names of ``swapaxes``, by those of ``transpose``, the same operator.
SWAPAXES = {"axis0": "dim0", "axis1": "dim1"}
#: The first stride of a meta tensor whose strides are all different.
_APART = 1 << 20


def _permutation_rule(name: str) -> Callable[..., RuleResult]:
    """The rule of an operator that only permutes dims, found by the effect on a meta tensor."""
    operator = getattr(torch.Tensor, name)

    def answer(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        strides = [_APART + i for i in range(input.ndim)]
        probe = torch.empty_strided([2] * input.ndim, strides, device="meta")
        kwargs = {SWAPAXES.get(name, name): value for name, value in kwargs.items()}
        try:
            order = [stride - _APART for stride in operator(probe, *args, **kwargs).stride()]
        except (RuntimeError, IndexError):  # raised by torch when it is run
            return None
        factors = [Factor(size) for size in input.shape]
        return local_call({input: factors}, [[factors[i] for i in order]], rearranges=True)

    return answer


for _name in ("permute", "transpose", "t", "movedim", "adjoint"):
    rule(_name, is_view=True)(_permutation_rule(_name))


# -- compositions of these -------------------------------------------------------------------


def _for_each_tensor(body: Callable[[Tensor], Tensor]) -> Callable[..., RuleResult]:
    """The rule of an operator that takes one tensor, several, or a sequence of them."""

    def compute(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return body(tensors[0])
        return tuple(map(body, one_by_one(tensors)))

    return composed(compute)


def atleast_1d(x: Tensor) -> Tensor:
    """The tensor with at least one dim."""
    return x.reshape(1) if x.dim() == 0 else x


def atleast_2d(x: Tensor) -> Tensor:
    """The tensor with at least two dims."""
    return x.reshape(1, 1) if x.dim() == 0 else x.unsqueeze(0) if x.dim() == 1 else x


def atleast_3d(x: Tensor) -> Tensor:
    """The tensor with at least three dims."""
    if x.dim() == 0:
        return x.reshape(1, 1, 1)
    if x.dim() == 1:
        return x.unsqueeze(0).unsqueeze(-1)
    return x.unsqueeze(-1) if x.dim() == 2 else x


rule("atleast_1d")(_for_each_tensor(atleast_1d))
rule("atleast_2d")(_for_each_tensor(atleast_2d))
rule("atleast_3d")(_for_each_tensor(atleast_3d))


@rule("rot90")
def _rot90(input: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> RuleResult:
    def compute(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
        a, b = dims
        match k % 4:
            case 1:
                return input.flip(b).transpose(a, b)
            case 2:
                return input.flip(a, b)
            case 3:
                return input.flip(a).transpose(a, b)
        return input.clone()

    if len({range(input.ndim)[dim] for dim in dims if -input.ndim <= dim < input.ndim}) != 2:
        return None  # torch refuses these
    return Decomposition(compute)
