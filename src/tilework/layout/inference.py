"""Which chunking, if any, made a list of boxes."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.layout.box import Box
from tilework.layout.chunking import chunk_offsets, chunk_sizes


def infer_chunking(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The dim that was cut into ``len(boxes)`` chunks, as ``torch.chunk`` does it, in this order.

    None if the boxes are something else: a grid, uneven sizes, another order. The first dim
    counts where several would do.

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
