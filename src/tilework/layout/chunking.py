"""Chunks of an extent: sizes and offsets as in ``torch.chunk``, or from explicit sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from tilework.layout.box import Box


def chunk_size(extent: int, n: int) -> int:
    """The size of a full chunk: ``extent / n``, rounded up.

    Raises:
        ValueError: ``n`` is below 1, or ``extent`` is negative.

    Example:
        >>> chunk_size(10, 4)
        3
    """
    if n < 1 or extent < 0:
        raise ValueError(
            f"an extent of 0 or more has 1 or more chunks, got extent {extent}, {n} chunks"
        )
    return -(-extent // n)


def chunk_sizes(extent: int, n: int) -> list[int]:
    """The sizes of ``n`` chunks: full chunks, then a shorter one, then empty ones.

    ``torch.chunk`` gives the same sizes, but leaves out empty chunks.

    Example:
        >>> chunk_sizes(10, 4), chunk_sizes(2, 4)
        ([3, 3, 3, 1], [1, 1, 0, 0])
    """
    size = chunk_size(extent, n)
    full, rest = divmod(extent, size) if size else (0, 0)
    return ([size] * full + [rest] + [0] * n)[:n]


def chunk_offsets(extent: int, n: int) -> list[int]:
    """The offsets of the ``n`` chunks: each starts one full chunk size after the chunk before it.

    An empty chunk may therefore start past the end of the extent.

    Example:
        >>> chunk_offsets(10, 4), chunk_offsets(2, 4)
        ([0, 3, 6, 9], [0, 1, 2, 3])
    """
    size = chunk_size(extent, n)
    return [size * i for i in range(n)]


def chunk_at(extent: int, n: int, place: int) -> tuple[int, int]:
    """Offset and size of one of the ``n`` chunks; an empty chunk is at the end of the extent.

    Example:
        >>> [chunk_at(10, 4, place) for place in range(4)]
        [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    size = chunk_size(extent, n)
    start = min(size * place, extent)
    return start, min(size, extent - start)


def offsets_of(sizes: Iterable[int]) -> list[int]:
    """The offsets of chunks of these sizes, one after the other.

    Example:
        >>> offsets_of([3, 0, 5])
        [0, 3, 3]
    """
    return [0, *accumulate(sizes)][:-1]


def infer_chunking(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The dim along which ``torch.chunk`` would split the shape into exactly these boxes, in order.

    None if no dim fits: the boxes are a grid, or have uneven sizes or another order. If several
    dims fit, the result is the first.

    Example:
        >>> infer_chunking((4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))])
        1
    """
    shape = tuple(shape)
    if not boxes or any(box.ndim != len(shape) for box in boxes):
        return None
    for dim, extent in enumerate(shape):
        starts, sizes = chunk_offsets(extent, len(boxes)), chunk_sizes(extent, len(boxes))
        zeros = (0,) * len(shape)
        if all(
            box.sizes == (*shape[:dim], size, *shape[dim + 1 :])
            and box.offsets == (*zeros[:dim], start, *zeros[dim + 1 :])
            for box, start, size in zip(boxes, starts, sizes, strict=True)
        ):
            return dim
    return None
