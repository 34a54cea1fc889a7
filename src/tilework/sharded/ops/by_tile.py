"""Operators that run tile by tile: each tile of a result is computed from one tile of each operand.

Elementwise operators do, on operands of one layout, which the results get, too. For all others the
operator table's rule gives a factor map, which is evaluated on boxes: each tile becomes a box of
the result, on the same rank. Nothing is communicated; a call that would need it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tilework.tiled.rules  # noqa: F401  # fills the operator table
from tilework.comm.contract import ProcessGroup
from tilework.comm.functional.internal import copy_to_group
from tilework.comm.world import NonMember, get_rank
from tilework.layout.internal import Ints
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.attributes import getters
from tilework.sharded.ops.tiles import (
    OTHER_LAYOUT,
    ResultLayout,
    boxes_of,
    cached,
    graph_tiles,
    layout_of,
    layout_of_boxes,
    of_tiles,
    same_layout,
    settle,
    sharded_argument,
    wrap,
    zeros_after,
)
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import (
    Arg,
    Dim,
    LocalCall,
    LocalOp,
    NotLocal,
    Obstacle,
    TileRanges,
    canonical_name,
    entry_of,
    propagate_boxes,
    shape_of,
    volume,
)

# -- operators and refusals --------------------------------------------------------------------

_NO_BOX = "the tiles would not be boxes of the new shape: reshard first"
_SHARDED_DIM = (
    "it runs along dims that are not sharded: reshard to a spec that leaves dim {} unsharded"
)
_PLAIN = (
    "a plain operand must be a number or a tensor without dims, and tensors that are joined must "
    "all be sharded: shard_tensor shards a plain one"
)
_REFUSALS = {
    Obstacle.UNSHARDABLE: _SHARDED_DIM,
    Obstacle.REDUCED: _SHARDED_DIM,
    Obstacle.UNALIGNED: _NO_BOX,
    Obstacle.SCATTERED: _NO_BOX,
    Obstacle.MISMATCHED: OTHER_LAYOUT,
}

#: Operators that run by their rules, and the refusal of calls that the rule does not know.
_BY_RULE = {
    """
    permute transpose movedim t reshape view flatten unflatten ravel expand broadcast_to unsqueeze
    """: _NO_BOX,
    """
    softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort topk flip
    normalize glu
    """: "give it a dim, and no out",
    "cat stack": "all must have as many dims, and no out",
}
_UNKNOWN = {name: refusal for names, refusal in _BY_RULE.items() for name in names.split()}
#: Functions that keep the shape, besides the elementwise operators of the table: compositions of
#: these, or functions of other values than elements. With "_": only the in-place form.
_KEEP_SHAPE = """
    _threshold alpha_dropout bernoulli cauchy_ detach dropout empty_like exponential_ fill_
    full_like geometric_ log_normal_ normal_ ones_like rand_like randint_like randn_like random_
    retain_grad rrelu softsign tanhshrink type uniform_ zeros_like
"""
_SHAPE_KEEPING = frozenset(_KEEP_SHAPE.split())
#: Functions without a rule, with the operator that needs the same dims, and the arguments of this
#: operator's rule.
_RULED_AS: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "nanmean": ("nansum", lambda input, dim=None, keepdim=False, **_: (input, dim, keepdim)),
    "norm": (
        "linalg_vector_norm",
        lambda input, p=2, dim=None, keepdim=False, *_, **__: (input, 2, dim, keepdim),
    ),
    "normalize": ("softmax", lambda input, p=2, dim=1, *_, **__: (input, dim)),
    "softmin": ("softmax", lambda input, dim=None, *_, **__: (input, dim)),
}


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of an operator that runs tile by tile."""
    unknown = _UNKNOWN.get(name)
    if unknown is not None:
        return None if in_place and unknown is _NO_BOX else by_tile(func, unknown)
    names = {name, f"{name}_"} if in_place else {name}
    keeps_shape = entry_of(name).is_elementwise or names & _SHAPE_KEEPING
    return elementwise(func) if keeps_shape else None


# -- the engine --------------------------------------------------------------------------------


class _Call:
    __slots__ = ("args", "func", "kwargs", "operands", "plain")

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        #: The sharded tensors, and the plain tensors.
        self.operands: list[ShardedTensor] = []
        self.plain: list[Tensor] = []
        self._note((*args, *kwargs.values()))
        if not self.operands or any(tensor.dim() for tensor in self.plain):
            raise self.refused(_PLAIN if self.operands else "")

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, ShardedTensor):
                self.operands.append(value)
            elif isinstance(value, Tensor):
                self.plain.append(value)
            elif isinstance(value, list | tuple):
                self._note(value)

    def refused(self, hint: str) -> RuntimeError:
        return unsupported(self.func, self.args, self.kwargs, hint)

    def with_others(self, others: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(others)
        given = [_replaced(value, rest) for value in self.args]
        return given, {name: _replaced(value, rest) for name, value in self.kwargs.items()}

    def on(self, tensors: Iterable[Tensor]) -> Any:
        given, named = self.with_others(tensors)
        return self.func(*given, **named)

    def replicate_plain(self, group: ProcessGroup | NonMember) -> None:
        """Sum the gradients of plain tensors, which all ranks have, over all tiles."""
        if self.plain and not isinstance(group, NonMember):
            copied = [copy_to_group(x, group) if x.requires_grad else x for x in self.plain]
            by_id = dict(zip(map(id, self.plain), copied, strict=True))
            self.args, self.kwargs = pytree.tree_map(
                lambda leaf: by_id.get(id(leaf), leaf), (self.args, self.kwargs)
            )


def _replaced(value: Any, rest: Iterator[Any]) -> Any:
    if isinstance(value, ShardedTensor):
        return next(rest)
    if not isinstance(value, list | tuple):
        return value
    items = [_replaced(item, rest) for item in value]
    return value if all(map(is_, items, value)) else items


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """The rule of a call, for operands of these layouts and the same static arguments."""

    call: LocalCall
    op: LocalOp
    #: The layouts of results, by the number of the result and the shape of the result of a tile.
    layouts: dict[tuple[int, Ints], ResultLayout] = field(default_factory=dict)

    def run(self, call: _Call, number: int | None, tiles: Sequence[Tensor]) -> Any:
        """The result for the tiles of one number, or, where that is None, for stand-ins."""
        make = self.call.run
        run = make(TileRanges(self.op, number)) if make and number is not None else None
        if run is not None:
            return run(*tiles)
        if self.op.map.rearranges and number is None:
            return torch.cat([tile.flatten() for tile in tiles])
        if self.op.map.rearranges or (number is not None and all(x.numel() for x in tiles)):
            return call.on(tiles)
        inputs = zip(call.operands, tiles, self.op.map.inputs, strict=True)
        return call.on([zeros_after(x, _with_elements(x, tile, dims)) for x, tile, dims in inputs])

    def layout(self, tensor: ShardedTensor, output: int, result: Tensor) -> ResultLayout:
        known = self.layouts.get((output, result.shape))
        if known is not None:
            return known
        dims, shapes = self.op.map.outputs[output], self.call.shapes
        if self.op.map.rearranges:
            shape = shape_of(dims) if shapes is None else tuple(shapes[output])
        else:
            sizes = zip(dims, result.shape, strict=True)
            shape = tuple([size if _is_whole(dim) else volume(dim) for dim, size in sizes])
        boxes = self.op.boxes(output, shape)
        same = shape == tuple(tensor.shape) and list(boxes) == boxes_of(tensor)
        layout = layout_of(tensor) if same else layout_of_boxes(tensor, shape, boxes)
        return self.layouts.setdefault((output, result.shape), layout)


def _is_whole(dim: Dim) -> bool:
    """True if each tile has all of a dim, which may have another length in the result."""
    return not dim or dim[_outermost(dim)].unshardable


def _with_elements(tensor: ShardedTensor, tile: Tensor, dims: Sequence[Dim]) -> list[int]:
    """The sizes of a tile, with 0 replaced by the smallest size of a part with elements."""
    each = zip(tile.shape, tensor.shape, dims, strict=True)
    return [
        n or (size if _is_whole(dim) else volume(dim[_outermost(dim) + 1 :]))
        for n, size, dim in each
    ]


def _outermost(dim: Dim) -> int:
    """The position in a dim of the outermost factor longer than 1: only this may be split."""
    return next((at for at, factor in enumerate(dim) if factor.size != 1), 0)


def _planned(call: _Call, unknown: str) -> _Plan:
    """The rule of a call, evaluated on the operands' boxes; raises for obstacles."""
    first, *others = call.operands

    def make() -> _Plan | NotLocal | None:
        local = None if call.kwargs.get("out") is not None else _local_call(call)
        if local is None or (call.plain and local.run is not None):
            return None
        op = propagate_boxes(local.map, [tensor.tiling for tensor in call.operands])
        return op if isinstance(op, NotLocal) else _Plan(local, op)

    plan: _Plan | NotLocal | None
    if any(tensor.process_group is not first.process_group for tensor in others):
        plan = NotLocal(Obstacle.MISMATCHED)
    elif call.plain:
        plan = make()  # a plain tensor may be changed, and then mean another call
    else:
        dtypes = [tensor._metadata.tensor_properties.dtype for tensor in call.operands]
        key = call.func, _static(call.args), _static((*call.kwargs.items(),)), *dtypes
        plan = cached(first, (*key, *(tensor.tiling for tensor in others)), make)
    if isinstance(plan, _Plan):
        return plan
    if plan is None or unknown is OTHER_LAYOUT:
        raise call.refused(unknown)
    raise call.refused(_REFUSALS[plan.obstacle].format(plan.dim))


def _local_call(call: _Call) -> LocalCall | None:
    name = canonical_name(call.func)[0]
    ruled, arguments = _RULED_AS.get(name, (name, None))
    rule = entry_of(ruled).rule
    operands = enumerate(call.operands)
    known = [Arg(n, tuple(x.shape), x.dtype, frozenset()) for n, x in operands]
    given, named = call.with_others(known)
    try:
        if arguments is not None:
            given, named = list(arguments(*given, **named)), {}
        answer = rule and rule(*given, **named)
    except TypeError:  # arguments that the rule does not know
        answer = None
    if isinstance(answer, LocalCall) and answer.fits(known):
        return answer
    if not call.plain:
        call.on([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in call.operands])
    return None


def _static(value: Any) -> Hashable:
    """Arguments as a key; a bool differs from the number that it equals."""
    if isinstance(value, ShardedTensor):
        return ShardedTensor
    if isinstance(value, list | tuple):
        return tuple([_static(item) for item in value])
    return value.__class__, value


def by_tile(func: Callable[..., Any], unknown: str, keeps_shape: bool = False) -> Handler:
    """The handler that runs ``func`` tile by tile; ``unknown`` refuses calls without a rule.

    ``keeps_shape``: operands with one layout give results with this layout, without a rule.
    """
    name, in_place = canonical_name(func)
    is_ruled = not keeps_shape or (entry_of(name).is_elementwise and not in_place)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        call = _Call(func, args, kwargs)
        first, plan = call.operands[0], None
        if not (keeps_shape and all(same_layout(first, other) for other in call.operands)):
            if not is_ruled:
                raise call.refused(unknown)
            plan = _planned(call, unknown)
        call.replicate_plain(process_group)
        tiles = [graph_tiles(operand) for operand in call.operands]
        parts = zip(*tiles, strict=True)
        if plan is None or keeps_shape or in_place:
            results = list(map(call.on, parts))
        else:
            numbers = first.tiling.of(get_rank()) or (None,)
            results = list(map(partial(plan.run, call), numbers, parts))
        return _collected(results, partial(_sharded, call, plan, tiles))

    return handler


def _collected(results: Sequence[Any], sharded: Callable[[Sequence[Tensor], int], Tensor]) -> Any:
    if isinstance(results[0], Tensor):
        return sharded(results, 0)
    if not isinstance(results[0], list | tuple):
        return results[0]
    return type(results[0])(map(sharded, zip(*results, strict=True), count()))


def _sharded(
    call: _Call,
    plan: _Plan | None,
    tiles: Sequence[Sequence[Tensor]],
    results: Sequence[Tensor],
    output: int,
) -> ShardedTensor:
    for operand, own in zip(call.operands, tiles, strict=True):
        if results[0] is own[0] and all(map(is_, results, own)):
            return settle(operand)
    first = call.operands[0]
    if plan is not None:
        return of_tiles(first, plan.layout(first, output, results[0]), results)
    if any(part.shape != tile.shape for part, tile in zip(results, tiles[0], strict=True)):
        raise call.refused("")
    return wrap(first, results)


def elementwise(func: Callable[..., Any]) -> Handler:
    """The handler that runs ``func``, which keeps the shape, on the tiles of operands."""
    return by_tile(func, OTHER_LAYOUT, keeps_shape=True)


# -- special forms -----------------------------------------------------------------------------


def _where(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    if len(args) + len(kwargs) < 3:
        raise unsupported(torch.where, args, kwargs, "only with all three arguments")
    return elementwise(torch.where)(types, args, kwargs, process_group)


def _reorders(func: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        tensor = sharded_argument(func, args, kwargs)
        # Extents 0, 1, 2, … show where each dim goes.
        order = func(torch.empty(tuple(range(tensor.dim())), device="meta")).shape
        return tensor.permute(tuple(order))

    return handler


TABLE: dict[Callable[..., Any], Handler] = {
    torch.where: _where,
    **{func: _reorders(func) for func in getters("T", "mT")},
}
