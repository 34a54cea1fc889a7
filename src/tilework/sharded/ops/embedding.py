"""Look-ups in a sharded table. Each rank has different ids, and gets rows of the full table.

Each rank asks the owners for the rows that it lacks, each row once, and runs torch's own operator
on these rows. A tile gets the gradient of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.comm.contract import ProcessGroup
from tilework.layout import Box
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.exchange import (
    agree_on_gradients,
    assemble,
    exchange,
    tiles_by_rank,
    working_tiles,
)
from tilework.sharded.ops.tiles import member_of
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def rows_of(
    ids: Tensor, weight: ShardedTensor, name: str, refuse: Callable[[], None]
) -> tuple[Tensor, Tensor]:
    """The rows that ``ids`` name, each once and in order, and the row of each id. Collective.

    A rank receives the ids that others look up in its tiles, and the rows that it asked for.
    """
    group = member_of(weight, name)
    tiles = tiles_by_rank(weight, group)
    unique: list[Tensor] = []

    def check() -> list[int]:
        refuse()
        if ids.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{name}: ids must be int32 or int64, got {ids.dtype}")
        wanted, inverse = torch.unique(ids.long(), return_inverse=True)
        n = weight.shape[0]
        if wanted.numel() and not 0 <= wanted[0] <= wanted[-1] < n:
            outside = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise IndexError(f"{name}: id {int(outside)} is out of range for {n} rows")
        unique.extend((wanted, inverse))
        spans = [span for boxes in tiles for span in _rows(boxes)]
        return [stop - start for start, stop in _within(wanted, spans)]

    counts = agree_on_gradients(check, [weight], group)
    wanted, inverse = unique
    return _fetch(wanted, weight, tiles, counts, group), inverse


def _rows(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """The start and end of each distinct run of rows that these tiles have."""
    return list(dict.fromkeys((box.offsets[0], box.ends[0]) for box in boxes))


def _within(wanted: Tensor, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The range of the sorted ids that lie in each span: from, to."""
    edges = torch.tensor(list(spans), dtype=torch.int64, device=wanted.device).reshape(-1, 2)
    return [(start, stop) for start, stop in torch.searchsorted(wanted, edges).tolist()]


def _fetch(
    wanted: Tensor,
    weight: ShardedTensor,
    tiles: list[list[Box]],
    counts: list[list[int]],
    group: ProcessGroup,
) -> Tensor:
    spans = [_rows(boxes) for boxes in tiles]
    first = sum(len(of_rank) for of_rank in spans[: group.rank()])
    own, mine = working_tiles(weight), slice(first, first + len(spans[group.rank()]))
    # Ids go to the ranks that have the rows …
    parts = [
        torch.cat([wanted[:0], *(wanted[start:stop] for start, stop in _within(wanted, of_rank))])
        for of_rank in spans
    ]
    requested = exchange(parts, [sum(numbers[mine]) for numbers in counts], group)
    by_span = [
        dict(zip(spans[group.rank()], part.split_with_sizes(numbers[mine]), strict=True))
        for part, numbers in zip(requested, counts, strict=True)
    ]
    # … and rows come back, tile by tile.
    parts = [torch.cat([_look_up(box, tile, ids) for box, tile in own]) for ids in by_span]
    return _receive(parts, wanted, weight, tiles, group)


def _receive(
    parts: Sequence[Tensor],
    wanted: Tensor,
    weight: ShardedTensor,
    tiles: list[list[Box]],
    group: ProcessGroup,
) -> Tensor:
    """The wanted rows, after sending each rank its part of rows."""
    places = [
        [(start, stop, box) for box in boxes for start, stop in _within(wanted, _rows([box]))]
        for boxes in tiles
    ]
    sizes = [[(stop - start) * box.sizes[1] for start, stop, box in runs] for runs in places]
    received = exchange(parts, [sum(numbers) for numbers in sizes], group)
    boxes, chunks = [], []
    for part, of_rank, numbers in zip(received, places, sizes, strict=True):
        split = part.split_with_sizes(numbers)
        for chunk, (start, stop, box) in zip(split, of_rank, strict=True):
            boxes.append(Box((start, box.offsets[1]), (stop - start, box.sizes[1])))
            chunks.append(chunk.view(stop - start, box.sizes[1]))
    return assemble((len(wanted), weight.shape[1]), boxes, chunks)


def _look_up(box: Box, tile: Tensor, by_span: dict[tuple[int, int], Tensor]) -> Tensor:
    ids = by_span.get((box.offsets[0], box.ends[0]))
    return tile.reshape(-1) if ids is None else tile[ids - box.offsets[0]].reshape(-1)


# -- handlers ----------------------------------------------------------------------------------

_SINGLE = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq",
    "sparse")  # fmt: skip
_BAG = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode",
    "sparse", "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip


def _handler(func: Callable[..., Any], names: tuple[str, ...]) -> Any:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        options = dict(zip(names, args, strict=False)) | kwargs
        ids, weight = options.pop("input"), options.pop("weight")
        if isinstance(ids, ShardedTensor) or not isinstance(weight, ShardedTensor):
            raise unsupported(func, args, kwargs, "the table is sharded, the ids are plain")
        padding = options.pop("padding_idx", None)

        def refuse() -> None:
            if weight.dim() != 2:
                raise unsupported(func, args, kwargs, "the table must have two dims")
            if options.get("max_norm") is not None:
                hint = "max_norm would change the table: renormalize the shards"
                raise unsupported(func, args, kwargs, hint)
            if options.get("sparse"):
                raise unsupported(func, args, kwargs, "shards get dense gradients: sparse=False")
            if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
                raise ValueError(f"padding_idx {padding} is not within {weight.shape[0]} rows")

        rows, inverse = rows_of(ids, weight, func.__name__, refuse)
        if padding is not None:
            padded = inverse[ids == padding % weight.shape[0]]
            options["padding_idx"] = int(padded[0]) if padded.numel() else None
        result: Tensor = func(inverse, rows, **options)
        return result

    return handler


TABLE: dict[Callable[..., Any], Handler] = {
    F.embedding: _handler(F.embedding, _SINGLE),
    F.embedding_bag: _handler(F.embedding_bag, _BAG),
}
