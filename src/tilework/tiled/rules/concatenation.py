"""Concatenation: cat, stack, and operators composed of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.reshaping import atleast_1d, atleast_2d, atleast_3d, dim_at


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
    """The concatenation without tensors of shape [0], which torch lets pass beside any others.

    Caches of keys and values start with such tensors.
    """
    kept = [not _is_legacy(arg) for arg in tensors]
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


def _is_legacy(arg: Any) -> bool:
    return isinstance(arg, Arg) and arg.shape == (0,)


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


def composed_rule(compute: Callable[..., Any]) -> Callable[..., RuleResult]:
    """The rule of an operator that is composed of others."""
    return lambda *_, **__: Decomposition(compute)


def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(map(atleast_1d, tensors))
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors], 1)


def _block_diag(*tensors: Any) -> Tensor:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    blocks = list(map(atleast_2d, given))
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
    return torch.stack([coordinate.reshape(-1) for coordinate in grid], 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    places = torch.arange(input.shape[0], device=input.device)
    return input[torch.combinations(places, r, with_replacement)]


rule("hstack")(composed_rule(_hstack))
rule("vstack")(composed_rule(lambda tensors: torch.cat([atleast_2d(x) for x in tensors], 0)))
rule("dstack")(composed_rule(lambda tensors: torch.cat([atleast_3d(x) for x in tensors], 2)))
rule("column_stack")(composed_rule(_column_stack))
rule("block_diag")(composed_rule(_block_diag))
rule("kron")(composed_rule(_kron))
rule("cartesian_prod")(composed_rule(_cartesian_prod))
rule("combinations")(composed_rule(_combinations))


@rule("meshgrid")
def _meshgrid(*tensors: Any, indexing: str | None = None) -> RuleResult:
    given: Sequence[Arg] = tensors if tensors and isinstance(tensors[0], Arg) else tensors[0]
    alike = len({arg.dtype for arg in given if isinstance(arg, Arg)}) == 1
    if not alike or any(arg.ndim > 1 for arg in given) or indexing not in (None, "ij", "xy"):
        return None  # torch raises where it is run
    # torch warns without an indexing; here the rule warns once, not each call.
    return Decomposition(_grid_xy if indexing == "xy" and len(given) > 1 else _grid)


def _grid(*tensors: Any, **_: Any) -> tuple[Tensor, ...]:
    given = tensors if isinstance(tensors[0], Tensor) else tensors[0]
    shape = [x.numel() for x in given]
    return tuple([
        x.view([x.numel() if at == dim else 1 for at in range(len(given))]).expand(shape)
        for dim, x in enumerate(given)
    ])  # fmt: skip


def _grid_xy(*tensors: Any, **_: Any) -> tuple[Tensor, ...]:
    first, second, *rest = tensors if isinstance(tensors[0], Tensor) else tensors[0]
    rows, columns, *others = _grid(second, first, *rest)
    return columns, rows, *others
