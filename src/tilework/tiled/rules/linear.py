"""Products of matrices and vectors: linear in each tensor, summed over contracted dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import (
    Dim,
    DimFactors,
    Factor,
    Pattern,
    broadcast,
    dim_factors,
    factors_of,
)
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalRanges,
    MakeRun,
    RuleResult,
    local_call,
    match_pattern,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.reshaping import one_by_one


def product(text: str, a: Arg, b: Arg) -> RuleResult:
    """The sharding rule of a product of two tensors, from a pattern of the dims."""
    return match_pattern(text, [a, b], linear=[[a], [b]])


def _register_product(names: str, text: str) -> None:
    @rule(*names.split(), values_matter=False)
    def answer(*tensors: Any, **named: Any) -> RuleResult:
        return product(text, *tensors, *named.values())


_register_product("mm _int_mm", "i k, k j -> i j")
_register_product("bmm", "b i k, b k j -> b i j")
_register_product("mv", "i k, k -> i")
_register_product("dot vdot", "k, k ->")
_register_product("outer ger", "i, j -> i j")


@rule("linear", values_matter=False)
def _linear(input: Any, weight: Any, bias: Any = None) -> RuleResult:
    text = "b* i, o i, o? -> b* o" if weight.ndim == 2 else "b* i, i, b*? -> b*"
    sums = [[input, bias], [weight, bias]]
    return match_pattern(text, [input, weight, bias], linear=sums, addends=[bias])


@rule("bilinear", values_matter=False)
def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> RuleResult:
    def run(ranges: LocalRanges) -> Callable[..., Tensor] | None:
        # The same decision on all ranks: gradients have to come in the same order.
        return _bilinear_of_empty if ranges.has_empty_shards else None

    tensors = [input1, input2, weight, bias]
    sums = [[tensor, bias] for tensor in tensors[:3]]
    return match_pattern(
        "b* i, b* j, o i j, o? -> b* o", tensors, linear=sums, addends=[bias], run=run
    )


def _bilinear_of_empty(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``bilinear`` by einsum, for tensors without elements, which torch's kernel refuses."""
    result = torch.einsum("...i,...j,oij->...o", a, b, weight)
    return result if bias is None else result + bias


@rule("matmul", "linalg_matmul", values_matter=False)
def _matmul(input: Any, other: Any) -> RuleResult:
    rows = "k" if input.ndim == 1 else "b* i k"
    columns = "k" if other.ndim == 1 else "b* k j"
    out = "b*" * (input.ndim > 1 or other.ndim > 1) + " i" * (input.ndim > 1)
    return product(f"{rows}, {columns} -> {out}{' j' * (other.ndim > 1)}", input, other)


@rule("inner", values_matter=False)
def _inner(input: Any, other: Any) -> RuleResult:
    if input.ndim == 0 or other.ndim == 0:
        return product("b*, b* -> b*", input, other)
    return product("a* k, b* k -> a* b*", input, other)


@rule("linalg_vecdot")
def _vecdot(x: Any, y: Any, *, dim: int = -1) -> RuleResult:
    factors, dims_of_each = broadcast([x.shape, y.shape])
    rest = [factor for at, factor in enumerate(factors) if at != dim % len(factors)]
    return local_call(dict(zip([x, y], dims_of_each, strict=True)), [rest], linear=[[x], [y]])


@rule("linalg_cross")
def _cross_along(input: Any, other: Any, *, dim: int = -1) -> RuleResult:
    factors, dims_of_each = broadcast([input.shape, other.shape])
    factors[dim].unshardable = True
    inputs = dict(zip([input, other], dims_of_each, strict=True))
    run = partial(torch.linalg.cross, dim=dim)
    return local_call(inputs, [factors], linear=[[input], [other]], run=lambda ranges: run)


@rule("cross")
def _cross(input: Any, other: Any, dim: int | None = None) -> RuleResult:
    """The rule of ``cross``, whose default dim is the first of size 3 of the full tensor."""
    threes = (at for at, size in enumerate(input.shape) if size == 3)
    return _cross_along(input, other, dim=next(threes, -1) if dim is None else dim)


# -- with something added --------------------------------------------------------------------


def _with_addend(
    text: str, input: Arg, a: Any, b: Any, *, run: MakeRun | None = None
) -> RuleResult:
    """The rule of ``addmm`` and so on: ``input`` plus a product of ``a`` and ``b``."""
    try:
        mapped = Pattern.parse(text).of([a.shape, b.shape])
    except ValueError:
        return None
    (out,) = mapped.outputs
    if input.ndim > len(out):
        return None
    last = out[len(out) - input.ndim :]
    if any(size not in (1, dim[0].size) for size, dim in zip(input.shape, last, strict=True)):
        return None  # torch raises, though parts of the tensors may fit
    dims = [dim if size == dim[0].size else () for size, dim in zip(input.shape, last, strict=True)]
    factors_of_product = dict(zip([a, b], mapped.inputs, strict=True))
    sums = [[input, a], [input, b]]
    return local_call(
        {input: dims, **factors_of_product}, [out], linear=sums, addends=[input], run=run
    )


@rule("addmm", values_matter=False)
def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> RuleResult:
    if isinstance(beta, float) and not (input.dtype.is_floating_point or input.dtype.is_complex):
        return None  # torch refuses empty sums, which some ranks may have
    return _with_addend("i k, k j -> i j", input, mat1, mat2)


@rule("addmv")
def _addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> RuleResult:
    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        # torch.addmv does not expand the addend if the sum is empty.
        return lambda input, mat, vec: torch.addmv(
            input.expand(len(mat)), mat, vec, beta=beta, alpha=alpha
        )

    expanded = mat.ndim == 2 and input.shape == mat.shape[:1]
    return _with_addend("i k, k -> i", input, mat, vec, run=None if expanded else run)


def _register_sum(name: str, text: str) -> None:
    @rule(name, values_matter=False)
    def answer(*tensors: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> RuleResult:
        return _with_addend(text, *tensors, *named.values())


_register_sum("addr", "i, j -> i j")
_register_sum("addbmm", "b i k, b k j -> i j")
_register_sum("baddbmm", "b i k, b k j -> b i j")


# -- groups of rows --------------------------------------------------------------------------


@rule("_grouped_mm", values_matter=False)
def _grouped_product(
    input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> RuleResult:
    """Products of groups of rows with one matrix per group; each rank has a range."""
    if bias is not None or out_dtype not in (None, input.dtype):
        return None
    if offs is None:
        text, both = "g i k, g k j -> g i j", [input, mat2]
        return match_pattern(text, both, linear=[[input], [mat2]], run=lambda _: torch.bmm)
    if (input.ndim, mat2.ndim, offs.ndim) != (2, 3, 1) or offs.shape[0] != mat2.shape[0]:
        return None
    row, k = factors_of(input.shape, "rk")
    group, _, column = factors_of(mat2.shape, "gkj")

    def make(ranges: LocalRanges) -> Callable[..., Tensor] | None:
        if not any(map(ranges.is_sharded, (row, k, group, column))):
            return None
        return partial(_product_of_groups, ranges.local_range(row), ranges.local_range(group))

    return local_call(
        {input: [row, k], mat2: [group, k, column], offs: [None]},
        [[row, column]],
        linear=[[input], [mat2]],
        run=make,
    )


def call_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on meta: torch's products of groups know only bfloat16 there."""
    if func.name() != "aten::_grouped_mm":  # which torch 2.6 does not have
        return func(*args, **kwargs)
    a, b, *rest = args
    groups = a.shape[:-2] if b.dim() == 3 else (rest[0] if rest else kwargs["offs"]).shape
    leading = groups if a.dim() == b.dim() else ()
    return torch.empty((*leading, a.shape[-2], b.shape[-1]), dtype=a.dtype, device="meta")


def _product_of_groups(
    rows: tuple[int, int], groups: tuple[int, int], x: Tensor, matrices: Tensor, ends: Tensor
) -> Tensor:
    local_ends = (ends - rows[0]).clamp(0, rows[1]).tolist()
    first = local_ends[groups[0] - 1] if groups[0] else 0
    stops = local_ends[groups[0] : sum(groups)]
    last = stops[-1] if stops else first
    wanted = x[first:last]
    if stops and _is_aligned(wanted, matrices):
        offsets = torch.tensor(stops, dtype=torch.int32, device=x.device) - first
        out = torch._grouped_mm(wanted, matrices, offs=offsets)
    else:
        spans = zip([first, *stops], stops, strict=False)
        parts = [
            x[start:end] @ matrix for (start, end), matrix in zip(spans, matrices, strict=True)
        ]
        out = torch.cat(parts) if parts else x[:0] @ matrices.sum(0)
    return torch.nn.functional.pad(out, (0, 0, first, rows[1] - last))


def _is_aligned(*tensors: Tensor) -> bool:
    """True if torch's kernel accepts the strides of the matrices and of their gradients."""
    return all(
        size and size * x.itemsize % 16 == 0 and 1 in x.stride()[-2:]
        for x in tensors
        for size in (x.shape[-1], max(x.stride()[-2:]), x.shape[-2] if x.dim() > 2 else 16)
    )


# -- of any number of factors ----------------------------------------------------------------


def _multilinear(
    tensors: Sequence[Arg], dims_of_each: Sequence[DimFactors], out: Sequence[Dim]
) -> RuleResult:
    return local_call(
        dict(zip(tensors, dims_of_each, strict=True)),
        [out],
        linear=[[tensor] for tensor in tensors],
    )


@rule("chain_matmul", "linalg_multi_dot")
def _chain(*matrices: Any) -> RuleResult:
    tensors = one_by_one(matrices)
    factors = [factors_of(tensor.shape) for tensor in tensors]
    for before, after in itertools.pairwise(factors):
        after[0] = before[-1]
    ends = [*factors[0][:-1], *factors[-1][1:]]
    if len(tensors) == 1:
        ends = factors[0]
    return _multilinear(tensors, [dim_factors(dims) for dims in factors], dim_factors(ends))


@rule("tensordot")
def _tensordot(a: Any, b: Any, dims: Any = 2, dims_b: Any = None) -> RuleResult:
    if isinstance(dims, Arg):
        return Decomposition(
            lambda a, b, dims, **_: torch.tensordot(a, b, dims.tolist()), is_checked=True
        )
    if not isinstance(dims, int | list | tuple):
        return None
    if isinstance(dims, int):
        dims, dims_b = range(a.ndim - dims, a.ndim), range(dims)
    elif dims_b is None:
        dims, dims_b = dims
    if isinstance(dims, int):
        dims, dims_b = [dims], [dims_b]
    mine: list[Factor | None] = [*factors_of(a.shape)]
    theirs: list[Factor | None] = [*factors_of(b.shape)]
    summed = set()
    for i, j in zip(dims, dims_b, strict=True):
        if a.shape[i] == b.shape[j]:
            theirs[j] = mine[i]
        elif a.shape[i] == 1:
            mine[i] = None  # broadcast: each rank needs all of it
        elif b.shape[j] == 1:
            theirs[j] = None
        else:
            return None  # torch raises for the full tensors
        summed |= {mine[i], theirs[j]}
    out = [factor for factor in (*mine, *theirs) if factor not in summed]
    return _multilinear([a, b], [dim_factors(mine), dim_factors(theirs)], dim_factors(out))


# -- einsum ----------------------------------------------------------------------------------


#: The dims of a tensor in an equation: letters; dims of an ellipsis are counted from the end.
Names = list[str | int]


@rule("einsum")
def _einsum(equation: str, *operands: Any) -> RuleResult:
    """The call of an equation, which already is a factor map."""
    tensors = one_by_one(operands)
    parsed = _parsed(equation, [tensor.ndim for tensor in tensors])
    if parsed is None:
        return None
    names, result = parsed
    factors = _factors(names, tensors)
    if factors is None or not factors.keys() >= set(result):
        return None
    if len(names) == 1 and set(result) == set(names[0]) and len(result) == len(set(result)):
        if any(factors[n].size != size for n, size in zip(names[0], tensors[0].shape, strict=True)):
            return None  # torch raises
        return Decomposition(lambda _, *given: _shown(one_by_one(given)[0], names[0], result))
    dims_of_each = [
        dim_factors([
            factors[name] if factors[name].size == size else None
            for name, size in zip(names_of_dims, tensor.shape, strict=True)
        ])
        for names_of_dims, tensor in zip(names, tensors, strict=True)
    ]  # fmt: skip
    return _multilinear(tensors, dims_of_each, dim_factors([factors[name] for name in result]))


def _shown(tensor: Tensor, names: Names, result: Names) -> Tensor:
    """Einsum of one operand without a sum: a view with permuted dims, or with diagonals."""
    for name in result:
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            tensor = tensor.diagonal(0, first, second)
            names = [*names[:first], *names[first + 1 : second], *names[second + 1 :], name]
    return tensor.permute([names.index(name) for name in result])


def _parsed(equation: str, ndims: Sequence[int]) -> tuple[list[Names], Names] | None:
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if len(words) != len(ndims):
        return None
    widths = [n - len(word.replace("...", "")) for word, n in zip(words, ndims, strict=True)]
    names = [_names(word, width) for word, width in zip(words, widths, strict=True)]
    if [*map(len, names)] != [*ndims]:
        return None
    return names, _names(out, max(widths)) if arrow else _implied(names)


def _names(word: str, width: int) -> Names:
    head, dots, tail = word.partition("...")
    return [*head, *(range(-width, 0) if dots else ()), *tail]


def _implied(names: Sequence[Names]) -> Names:
    """The result's letters without an arrow: the ellipsis, then single letters in order."""
    occurring = [name for names_of_dims in names for name in names_of_dims]
    dots = sorted({name for name in occurring if isinstance(name, int)})
    return [*dots, *sorted(n for n in occurring if isinstance(n, str) and occurring.count(n) == 1)]


def _factors(names: Sequence[Names], tensors: Sequence[Arg]) -> dict[str | int, Factor] | None:
    """A factor per name; a name that occurs twice in one tensor (a diagonal) is unshardable."""
    factors: dict[str | int, Factor] = {}
    for names_of_dims, tensor in zip(names, tensors, strict=True):
        for name, size in zip(names_of_dims, tensor.shape, strict=True):
            factor = factors.setdefault(name, Factor(size, str(name)))
            if factor.size != size and 1 not in (factor.size, size):
                return None
            factor.size = size if factor.size == 1 else factor.size
            factor.unshardable |= names_of_dims.count(name) > 1
    return factors
