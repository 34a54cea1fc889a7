"""Products with a sharded weight. Each rank has a different input, and gets the result for it.

The weight stays in place. The columns of inputs that a tile needs move to the tile; partial
products move back and are summed. If the weight has fewer elements than these transfers, each rank
gathers the full weight instead. Backward mirrors forward: a tile gets the gradient of the sum of
all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.comm.contract import ProcessGroup
from tilework.layout import Box
from tilework.layout.internal import DEFAULT_COST
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.exchange import (
    agree_on_gradients,
    exchange,
    spread,
    tiles_by_rank,
    working_tiles,
)
from tilework.sharded.ops.tiles import member_of
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor

_HINT = "the weight is sharded and has two dims, the input is a plain tensor of this rank's own"


def linear(x: Tensor, weight: ShardedTensor, bias: Tensor | None, name: str = "linear") -> Tensor:
    """``x @ weight.T + bias``, for this rank's ``x``. Collective, also backward.

    The elements that a rank with ``b`` of all ``B`` rows receives: at most ``B`` times the columns
    of the rank's tiles, and ``b`` times the rows of all tiles (which is ``b * out`` times the
    number of tiles side by side along the columns); or the full weight if that is less.
    """
    group = member_of(weight, name)

    def check() -> list[int]:
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise RuntimeError(
                f"{name}: the input's last dim must have {weight.shape[1]} elements, as the "
                f"weight asks, got an input of shape {tuple(x.shape)}"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise RuntimeError(
                f"{name}: input and weight must have one dtype, got {x.dtype} and {weight.dtype}"
            )
        return [x.shape[:-1].numel()]

    inputs = [x, weight] if bias is None else [x, weight, bias]
    rows = [counts[0] for counts in agree_on_gradients(check, inputs, group)]
    tiles = tiles_by_rank(weight, group)
    elements = _elements_moved(rows, tiles), weight.numel() * (len(rows) - 1)
    # Only bytes decide: the number of messages of both ways depends on the tiling.
    moving_inputs, gathering = (
        DEFAULT_COST.collective_seconds(count * weight.itemsize, messages=0) for count in elements
    )
    if moving_inputs <= gathering:
        flat = _multiply_at_weight(
            x.reshape(rows[group.rank()], x.shape[-1]), weight, rows, tiles, group
        )
        result = flat.reshape(*x.shape[:-1], weight.shape[0])
    else:
        result = F.linear(x, spread(weight))
    if isinstance(bias, ShardedTensor):
        bias = spread(bias)
    if bias is not None and torch.is_autocast_enabled(x.device.type):
        bias = bias.to(result.dtype)
    return result if bias is None else result + bias


def _elements_moved(rows: Sequence[int], tiles: Sequence[Sequence[Box]]) -> int:
    total = 0
    for own, boxes in zip(rows, tiles, strict=True):
        per_row = sum(columns for _, columns in _columns(boxes)) + sum(b.sizes[0] for b in boxes)
        total += (sum(rows) - own) * per_row
    return total


def _columns(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """The start and length of each distinct run of columns that these tiles need."""
    return list(dict.fromkeys((box.offsets[1], box.sizes[1]) for box in boxes))


def _multiply_at_weight(
    x: Tensor, weight: ShardedTensor, rows: list[int], tiles: list[list[Box]], group: ProcessGroup
) -> Tensor:
    own, mine = working_tiles(weight), rows[group.rank()]
    columns = _columns([box for box, _ in own])
    # Each rank's columns go to the tiles that need them …
    parts = [_columns_of(x, _columns(boxes)) for boxes in tiles]
    width = sum(n for _, n in columns)
    received = exchange(parts, [count * width for count in rows], group)
    inputs = _by_columns(received, rows, columns)
    # … which multiply all ranks' rows …
    products = [F.linear(inputs[box.offsets[1], box.sizes[1]], tile) for box, tile in own]
    per_rank = zip(*(product.split_with_sizes(rows) for product in products), strict=True)
    parts = [torch.cat([*map(torch.flatten, of_rank)]) for of_rank in per_rank]
    # … and send each rank the products of its rows.
    received = exchange(parts, [mine * sum(b.sizes[0] for b in boxes) for boxes in tiles], group)
    by_box: dict[Box, Tensor] = {}
    for part, boxes in zip(received, tiles, strict=True):
        of_boxes = part.split_with_sizes([mine * box.sizes[0] for box in boxes])
        by_box.update((b, p.view(mine, b.sizes[0])) for b, p in zip(boxes, of_boxes, strict=True))
    ordered = [tile.box for tile in weight.tiling.tiles if tile.box in by_box]
    return _sum_products([(box, by_box[box]) for box in ordered], x, weight.shape[0])


def _columns_of(x: Tensor, columns: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([x[:, :0].reshape(-1), *(x[:, c : c + n].reshape(-1) for c, n in columns)])


def _by_columns(
    received: Sequence[Tensor], rows: Sequence[int], columns: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Tensor]:
    by_rank = [
        part.split_with_sizes([count * n for _, n in columns])
        for part, count in zip(received, rows, strict=True)
    ]
    return {
        run: torch.cat([s[i].view(count, run[1]) for s, count in zip(by_rank, rows, strict=True)])
        for i, run in enumerate(columns)
    }


def _sum_products(products: Sequence[tuple[Box, Tensor]], x: Tensor, width: int) -> Tensor:
    if not products:
        return x.sum(1, keepdim=True).expand(len(x), width) * 0
    edges = sorted({edge for box, _ in products for edge in (box.offsets[0], box.ends[0])})
    bands = []
    for start, stop in pairwise(edges):
        here = [
            product[:, start - box.offsets[0] : stop - box.offsets[0]]
            for box, product in products
            if box.offsets[0] <= start and stop <= box.ends[0]
        ]
        bands.append(here[0] if len(here) == 1 else torch.stack(here).sum(0))
    return torch.cat(bands, 1)


# -- handlers ----------------------------------------------------------------------------------


def _linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
    options = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = options["input"], options["weight"], options.get("bias")
    if isinstance(x, ShardedTensor) or not _is_matrix(weight):
        raise unsupported(F.linear, args, kwargs, _HINT)
    return linear(x, weight, bias)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and value.dim() == 2


def _matmul(func: Callable[..., Any], swapped: bool = False) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        names = ("input", "other"), ("self", "mat2"), ("input", "vec")
        operands = [*args, *(kwargs[name] for pair in names for name in pair if name in kwargs)]
        if len(operands) != 2 or kwargs.get("out") is not None:
            raise unsupported(func, args, kwargs, _HINT)
        a, b = reversed(operands) if swapped else operands
        if _is_matrix(b) and not isinstance(a, ShardedTensor):
            return linear(a, cast(ShardedTensor, b.t()), None, "matmul")
        if _is_matrix(a) and not isinstance(b, ShardedTensor) and b.dim() in (1, 2):
            return linear(b.t(), a, None, "matmul").t()
        raise unsupported(func, args, kwargs, _HINT)

    return handler


_PRODUCTS: list[Callable[..., Any]] = [torch.matmul, torch.mm, torch.mv, Tensor.matmul, Tensor.mm,
    Tensor.mv, Tensor.__matmul__]  # fmt: skip

TABLE: dict[Callable[..., Any], Handler] = {
    F.linear: _linear,
    **{func: _matmul(func) for func in _PRODUCTS},
    Tensor.__rmatmul__: _matmul(Tensor.__rmatmul__, swapped=True),
}
