"""Views of all elements, by the operator table's rules: factor maps, evaluated on boxes.

Each tile becomes a box of the result, on the same rank; nothing is communicated. Sharded dims can
be moved and split; they merge with dims that follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.layout.internal import Ints
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.ask_rule import local_call, static_key
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
from tilework.tiled import LocalOp, MakeRun, TileRanges, propagate_boxes, shape_of
from tilework.tiled.rules import SWAPAXES

_NO_BOX = "the tiles would not be boxes of the new shape: reshard first"


@dataclass(frozen=True, eq=False, slots=True)
class _View:
    """The result of a view's rule, for all tensors of one layout."""

    layout: ResultLayout
    #: The factor map, and the ranges of each tile, which ``run`` reads.
    op: LocalOp
    #: Makes the function for a tile. If this is None or makes None, the operator itself runs.
    run: MakeRun | None


def _view(func: Callable[..., Any], name: str) -> Handler:
    """The handler of a view of one tensor."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        tensor = sharded_argument(func, args, kwargs)
        options = args[1:], {k: v for k, v in kwargs.items() if k not in ("input", "self")}
        view = cached(
            tensor,
            (func, *map(static_key, options)),
            lambda: _evaluate(name, tensor, *options),
        )
        if view is None:
            casts = any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))
            raise unsupported(func, args, kwargs, "" if casts else _NO_BOX)

        def apply(tile: Tensor, number: int, sizes: Ints) -> Tensor:
            run = None if view.run is None else view.run(TileRanges(view.op, number))
            result: Tensor = func(tile, *options[0], **options[1]) if run is None else run(tile)
            return result

        return of_tiles(tensor, view.layout, apply)

    return handler


def _evaluate(
    name: str, tensor: ShardedTensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _View | None:
    """The view that these arguments make; None if tiles would not become boxes."""
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None
    named = {SWAPAXES.get(name, name): value for name, value in kwargs.items()}
    call = local_call(name, getattr(Tensor, name), (tensor, *args), named)
    op = None if call is None else propagate_boxes(call.map, [tensor.tiling])
    if call is None or not isinstance(op, LocalOp):
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
    return _view(func, name) if name in _VIEWS and not in_place else None


TABLE: dict[Callable[..., Any], Handler] = {func: _reorders(func) for func in getters("T", "mT")}
