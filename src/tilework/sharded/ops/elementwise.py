"""Elementwise operators, and others that keep a tensor's shape: they run on the tiles.

None of their factors is reduced or unshardable. All operands must have the same layout, which the
results get, too; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilework.comm.functional.internal import copy_to_group
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
from tilework.tiled import entry_of

#: Functions that keep the shape, besides the elementwise operators of the table: compositions of
#: these, or functions of other values than elements. With "_": only the in-place form.
_KEEP_SHAPE = """
    _threshold alpha_dropout bernoulli cauchy_ detach dropout empty_like exponential_ fill_
    full_like geometric_ log_normal_ normal_ ones_like rand_like randint_like randn_like random_
    retain_grad rrelu softsign tanhshrink type uniform_ zeros_like
"""
_SHAPE_KEEPING = frozenset(_KEEP_SHAPE.split())


def elementwise(func: Callable[..., Any]) -> Handler:
    """The handler that runs ``func`` on the tiles of operands with the same sharding."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        _check(func, args, kwargs, leaves, operands)
        leaves = [_replicated(leaf, process_group) for leaf in leaves]
        tiles = [graph_tiles(operand) for operand in operands]
        results = []
        for group in zip(*tiles, strict=True):
            parts = iter(group)
            local = [next(parts) if isinstance(x, ShardedTensor) else x for x in leaves]
            args_here, kwargs_here = pytree.tree_unflatten(local, form)
            results.append(func(*args_here, **kwargs_here))
        return _wrapped(func, args, kwargs, operands, tiles, results)

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


def _replicated(leaf: Any, group: Any) -> Any:
    """A plain operand as a replicated value: its gradient is the sum over all tiles."""
    if (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, ShardedTensor)
        and leaf.requires_grad
        and not isinstance(group, NonMember)
    ):
        return copy_to_group(leaf, group)
    return leaf


def _wrapped(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    operands: list[ShardedTensor],
    tiles: list[list[Tensor]],
    results: list[Any],
) -> Any:
    """The sharded tensors of the tiles' results."""
    first = results[0]
    if isinstance(first, Tensor):
        for operand, own in zip(operands, tiles, strict=True):
            if all(result is tile for result, tile in zip(results, own, strict=True)):
                return settle(operand)
        if any(r.shape != tile.shape for r, tile in zip(results, tiles[0], strict=True)):
            raise unsupported(func, args, kwargs)
        return wrap(operands[0], results)
    if isinstance(first, tuple):
        columns = [
            _wrapped(func, args, kwargs, operands, tiles, list(column))
            for column in zip(*results, strict=True)
        ]
        return columns if type(first) is tuple else type(first)(columns)
    return first


def _where(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    if len(args) + len(kwargs) < 3:
        raise unsupported(torch.where, args, kwargs, "only with all three arguments")
    return elementwise(torch.where)(types, args, kwargs, process_group)


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of a function that is elementwise or keeps the shape."""
    names = {name, f"{name}_"} if in_place else {name}
    keeps_shape = entry_of(name).is_elementwise or names & _SHAPE_KEEPING
    return elementwise(func) if keeps_shape else None


TABLE: dict[Callable[..., Any], Handler] = {torch.where: _where}
