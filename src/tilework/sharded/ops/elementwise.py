"""Operators that give each element of the result from the same element of each operand.

Which ones those are is taken from torch: they have the tag ``pointwise``. Each runs on the tiles;
nothing is communicated. So do the other operators here, that keep a tensor's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tilework.comm.functional.api import copy_to_group
from tilework.comm.world import NonMember
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.tiles import (
    OTHER_LAYOUT,
    PLAIN_OPERAND,
    graph_tiles,
    same_layout,
    settle,
    wrap,
)
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.pointwise import pointwise_names

#: Spelled differently from an operator with the tag, or made of such.
_ALIASES = """
    absolute and arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide expit fix float_power
    floor_divide floordiv gammainc gammaincc gammaln greater greater_equal hardswish hardtanh invert
    isclose isreal less less_equal log_sigmoid logsigmoid mod multigammaln multiply ndtr negative
    not_equal or psi rrelu rshift softsign subtract tanhshrink threshold truediv
"""
#: What keeps the shape, and is not computed from elements alone.
_SHAPE_KEEPING = """
    alpha_dropout bernoulli bfloat16 bool byte cauchy_ cdouble cfloat chalf char conj contiguous
    copy_ detach detach_ double dropout empty_like exponential_ fill_ float full_like geometric_
    half imag int log_normal_ long normal_ ones_like rand_like randint_like randn_like random_ real
    resolve_conj resolve_neg retain_grad short type uniform_ zero_ zeros_like
"""
#: Also names of reductions.
_NOT_HERE = {"max", "min"}


def elementwise(func: Callable[..., Any]) -> Handler:
    """Runs ``func`` on the tiles of its operands, which must be cut alike."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        _check(func, args, kwargs, leaves, operands)
        shared = [_shared(leaf, process_group) for leaf in leaves]
        tiles = [graph_tiles(operand) for operand in operands]
        results = []
        for group in zip(*tiles, strict=True):
            parts = iter(group)
            local = [next(parts) if isinstance(x, ShardedTensor) else x for x in shared]
            args_here, kwargs_here = pytree.tree_unflatten(local, form)
            results.append(func(*args_here, **kwargs_here))
        return _whole(func, args, kwargs, operands, tiles, results)

    return handler


def _check(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    leaves: list[Any],
    operands: list[ShardedTensor],
) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if not isinstance(leaf, ShardedTensor):
            if leaf.dim():
                raise unsupported(func, args, kwargs, PLAIN_OPERAND)
        elif not same_layout(operands[0], leaf):
            raise unsupported(func, args, kwargs, OTHER_LAYOUT)
    if not operands:
        raise unsupported(func, args, kwargs)


def _shared(leaf: Any, group: Any) -> Any:
    """A plain operand is one value that all ranks hold: its gradient is the sum over all tiles."""
    if (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, ShardedTensor)
        and leaf.requires_grad
        and not isinstance(group, NonMember)
    ):
        return copy_to_group(leaf, group)
    return leaf


def _whole(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    operands: list[ShardedTensor],
    tiles: list[list[Tensor]],
    results: list[Any],
) -> Any:
    """The sharded tensors of what came of the tiles."""
    first = results[0]
    if isinstance(first, Tensor):
        for operand, own in zip(operands, tiles, strict=True):
            if all(result is tile for result, tile in zip(results, own, strict=True)):
                return settle(operand)
        if any(r.shape != tile.shape for r, tile in zip(results, tiles[0], strict=True)):
            raise unsupported(func, args, kwargs)
        return wrap(operands[0], results)
    if isinstance(first, tuple):
        each = [
            _whole(func, args, kwargs, operands, tiles, list(column))
            for column in zip(*results, strict=True)
        ]
        return each if type(first) is tuple else type(first)(each)
    return first


def _where(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    if len(args) + len(kwargs) < 3:
        raise unsupported(torch.where, args, kwargs, "only with all three arguments")
    return elementwise(torch.where)(types, args, kwargs, process_group)


def spellings(name: str) -> Iterator[Callable[..., Any]]:
    """All functions of torch's that are this operator."""
    forms = (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")
    for space in (torch, Tensor, F, torch._C._nn, torch.special):
        for form in forms:
            found = getattr(space, form, None)
            if callable(found):
                yield found


ELEMENTWISE = (pointwise_names() | set(_ALIASES.split())) - _NOT_HERE

TABLE: dict[Callable[..., Any], Handler] = {
    func: elementwise(func)
    for name in sorted(ELEMENTWISE | set(_SHAPE_KEEPING.split()))
    for func in spellings(name)
} | {torch.where: _where}
