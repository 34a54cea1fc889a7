"""Views whose rules are factor maps: the operator table's rules, evaluated on boxes.

Each tile becomes the box that it is of the result, on the rank where it is; nothing is
communicated. Sharded dims can be moved and split; they merge with dims that follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilework.tiled.rules  # noqa: F401  # fills the operator table
from tilework.layout.box import Ints
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.basic import getters
from tilework.sharded.ops.result_layout import (
    ResultLayout,
    boxes_of,
    cached,
    layout_of,
    layout_of_boxes,
    of_tiles,
)
from tilework.sharded.ops.tiles import sharded_argument
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.box_propagation import LocalOp, NotLocal, TileRanges, propagate_boxes, shape_of
from tilework.tiled.op_rules import Arg, LocalCall, MakeRun, RuleFunction
from tilework.tiled.op_table import entry_of

_NO_BOX = "its tiles would be no boxes of the new shape: reshard first"
#: Names of ``swapaxes`` for arguments of the operator that it is.
_ALIASES = {"axis0": "dim0", "axis1": "dim1"}


@dataclass(frozen=True, eq=False, slots=True)
class _View:
    """A view of tensors that lie alike."""

    layout: ResultLayout
    op: LocalOp
    run: MakeRun | None


def view_by_rule(func: Callable[..., Any], rule: RuleFunction) -> Handler:
    """The handler of a view of one tensor."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        tensor = sharded_argument(func, args, kwargs)
        options = args[1:], {k: v for k, v in kwargs.items() if k not in ("input", "self")}
        key = func, _static(options[0]), tuple((k, _static(v)) for k, v in options[1].items())
        view = cached(tensor, key, lambda: _evaluate(func, rule, tensor, *options))
        if view is None:
            dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
            raise unsupported(func, args, kwargs, "" if dtypes else _NO_BOX)

        def apply(tile: Tensor, number: int, sizes: Ints) -> Tensor:
            run = None if view.run is None else view.run(TileRanges(view.op, number))
            result: Tensor = func(tile, *options[0], **options[1]) if run is None else run(tile)
            return result

        return of_tiles(tensor, view.layout, apply)

    return handler


def _static(value: Any) -> Hashable:
    """An argument as a key; a bool, say, is another one than the number that it equals."""
    if isinstance(value, list | tuple):
        return tuple(map(_static, value))
    return value.__class__, value


def _evaluate(
    func: Callable[..., Any],
    rule: RuleFunction,
    tensor: ShardedTensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> _View | None:
    """The view that these arguments make; None if tiles would be no boxes of it.

    Raises:
        Exception: Raised by torch, which does not take such arguments.
    """
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None
    input = Arg(0, tuple(tensor.shape), tensor.dtype, frozenset())
    try:
        call = rule(input, *args, **{_ALIASES.get(name, name): x for name, x in kwargs.items()})
    except TypeError:  # arguments that it does not know
        call = None
    if not isinstance(call, LocalCall):
        func(torch.empty(tensor.shape, device="meta"), *args, **kwargs)
        return None
    op = propagate_boxes(call.map, [tensor.tiling])
    if isinstance(op, NotLocal):
        return None
    shape = shape_of(call.map.outputs[0]) if call.shapes is None else call.shapes[0]
    boxes = op.boxes(0, shape)
    if shape == tuple(tensor.shape) and list(boxes) == boxes_of(tensor):
        return _View(layout_of(tensor), op, call.run)
    return _View(layout_of_boxes(tensor, shape, boxes), op, call.run)


def _reorders(func: Callable[..., Any]) -> Handler:
    """The handler of a property that reorders dims."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        tensor = sharded_argument(func, args, kwargs)
        # Extents 0, 1, 2, … show where each dim goes.
        order = func(torch.empty(tuple(range(tensor.dim())), device="meta")).shape
        return tensor.permute(tuple(order))

    return handler


_NAMES = """
    permute transpose movedim t reshape view flatten unflatten ravel expand broadcast_to unsqueeze
"""
_VIEWS = frozenset(_NAMES.split())


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of a view that keeps all elements."""
    rule = entry_of(name).rule
    return None if rule is None or name not in _VIEWS or in_place else view_by_rule(func, rule)


TABLE: dict[Callable[..., Any], Handler] = {func: _reorders(func) for func in getters("T", "mT")}
