"""Parts of a tensor, and the same elements in another shape: views of the tiles.

Each tile becomes the box that it is of the result, on the rank where it is; nothing is
communicated. Cut dims can be narrowed, moved and split; they merge with dims that follow them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from tilework.layout import Box
from tilework.sharded.ops.dim_ops import first_cut
from tilework.sharded.ops.tiles import graph_tiles, recut, wrap
from tilework.sharded.tensor import ShardedTensor


def _without(numbers: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*numbers[:dim], *numbers[dim + 1 :])


def _with(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def alias(tensor: ShardedTensor) -> ShardedTensor:
    """The same elements, as another tensor."""
    return wrap(tensor, [tile.view_as(tile) for tile in graph_tiles(tensor)])


def permute(tensor: ShardedTensor, order: Sequence[int]) -> ShardedTensor:
    """The dims in another order."""

    def moved(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers[d] for d in order)

    return recut(
        tensor,
        moved(tensor.shape),
        lambda box: Box(moved(box.offsets), moved(box.sizes)),
        lambda tile, box: tile.permute(*order),
    )


def narrow(tensor: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    """``length`` elements along a dim, from ``start``; tiles without any of them become empty."""

    def span(box: Box) -> tuple[int, int]:
        """Where the tile's part begins and ends, in the result."""
        begin = min(max(box.offsets[dim] - start, 0), length)
        return begin, max(min(box.offsets[dim] + box.sizes[dim] - start, length), begin)

    def place(box: Box) -> Box:
        begin, end = span(box)
        return Box(_with(box.offsets, dim, begin), _with(box.sizes, dim, end - begin))

    def apply(tile: Tensor, box: Box) -> Tensor:
        begin, end = span(box)
        first = min(max(begin + start - box.offsets[dim], 0), box.sizes[dim])
        return tile.narrow(dim, first, end - begin)

    return recut(tensor, _with(tensor.shape, dim, length), place, apply)


def select(tensor: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    """One element along a dim, without the dim; ranks that have nothing of it hold no shards."""

    def place(box: Box) -> Box | None:
        if not box.offsets[dim] <= index < box.offsets[dim] + box.sizes[dim]:
            return None
        return Box(_without(box.offsets, dim), _without(box.sizes, dim))

    def apply(tile: Tensor, box: Box) -> Tensor:
        return tile.select(dim, index - box.offsets[dim])

    return recut(tensor, _without(tensor.shape, dim), place, apply)


def unsqueeze(tensor: ShardedTensor, dim: int) -> ShardedTensor:
    """A new dim of one element."""

    def put(numbers: Sequence[int], value: int) -> tuple[int, ...]:
        return (*numbers[:dim], value, *numbers[dim:])

    return recut(
        tensor,
        put(tensor.shape, 1),
        lambda box: Box(put(box.offsets, 0), put(box.sizes, 1)),
        lambda tile, box: tile.unsqueeze(dim),
    )


def expand(tensor: ShardedTensor, size: Sequence[int]) -> ShardedTensor | None:
    """Dims of one element repeated, without memory; None if a tile has nothing of one."""
    new = len(size) - tensor.dim()
    for _ in range(new):
        tensor = unsqueeze(tensor, 0)
    wider = [d for d, extent in enumerate(tensor.shape) if size[d] != extent]
    if first_cut(tensor, wider) is not None:
        return None

    def widened(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size[d] if d in wider else extent for d, extent in enumerate(sizes))

    return recut(
        tensor,
        size,
        lambda box: Box(box.offsets, widened(box.sizes)),
        lambda tile, box: tile.expand(widened(box.sizes)),
    )


class _Group(NamedTuple):
    """Dims that become other dims of as many elements."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[_Group]:
    """The shortest runs of dims of the same number of elements, of shapes without zeros."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b, m, n = i, j, 1, 1
        while True:
            if m <= n and i < len(old) and (m < n or i == a):
                m, i = m * old[i], i + 1
            elif j < len(new):
                n, j = n * new[j], j + 1
            else:
                break
            if m == n and (j > b or j == len(new)):
                break
        yield _Group(tuple(range(a, i)), tuple(range(b, j)))


def reshape(tensor: ShardedTensor, size: Sequence[int]) -> ShardedTensor | None:
    """The same elements in another shape; None where a tile would be no box of it."""
    if tensor.numel() == 0:
        return None
    groups = list(_groups(tensor.shape, size))

    def place(box: Box) -> Box | None:
        offsets, sizes = [0] * len(size), list(size)
        for group in groups:
            if not _place_group(box, tensor.shape, size, group, offsets, sizes):
                return None
        return Box(tuple(offsets), tuple(sizes))

    boxes = [place(shard.box) for shard in tensor.metadata().shards_metadata]
    if None in boxes:
        return None
    return recut(tensor, size, place, lambda tile, box: tile.reshape(_sizes(place(box))))


def _sizes(box: Box | None) -> tuple[int, ...]:
    assert box is not None
    return box.sizes


def _place_group(
    box: Box,
    old: Sequence[int],
    new: Sequence[int],
    group: _Group,
    offsets: list[int],
    sizes: list[int],
) -> bool:
    """Whether the tile's part of these dims is one of the new ones; then it is noted."""
    cut = [d for d in group.old if (box.offsets[d], box.sizes[d]) != (0, old[d])]
    if not cut:
        return True
    before = [d for d in group.old if d < cut[0] and old[d] != 1]
    target = next((d for d in group.new if new[d] != 1), None)
    if len(cut) > 1 or before or target is None:
        return False
    # In elements of the whole group, then in steps along the first of the new dims.
    inner = math.prod(old[d] for d in group.old if d > cut[0])
    step = math.prod(new[d] for d in group.new if d > target)
    if box.offsets[cut[0]] * inner % step or box.sizes[cut[0]] * inner % step:
        return False
    offsets[target] = box.offsets[cut[0]] * inner // step
    sizes[target] = box.sizes[cut[0]] * inner // step
    return True
