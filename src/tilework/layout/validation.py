"""Checks that boxes do not overlap and that they cover a shape; errors name the boxes at fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilework.layout.box import Box
from tilework.layout.box_columns import BoxColumns


def find_overlap(
    offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """The numbers of two boxes that overlap, the lower number first; None if no two do.

    The boxes are given by offsets and sizes. Empty boxes overlap nothing.

    Raises:
        ValueError: The boxes differ in their number of dims.

    Example:
        >>> find_overlap([[0], [5], [4]], [[5], [5], [1]])
        (0, 2)
    """
    return BoxColumns(offsets, sizes).overlap()


def check_disjoint(boxes: Sequence[Box]) -> None:
    """Raise if two boxes share an element.

    Raises:
        ValueError: Two boxes overlap (the message names both), or have different numbers of dims.

    Example:
        >>> check_disjoint([Box((0,), (5,)), Box((4,), (5,))])
        Traceback (most recent call last):
        ValueError: boxes 0 and 1 overlap: [0:5] and [4:9] share [4:5]
    """
    _check_overlap(_columns(boxes), boxes)


def check_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise unless the boxes cover the shape, each element once. Empty boxes may be anywhere.

    Raises:
        ValueError: A box has another number of dims or is out of bounds, two boxes overlap, or a
            part of the shape is not covered; the message names them.

    Example:
        >>> check_boxes((10,), [Box((0,), (5,)), Box((5,), (5,))])
        >>> check_boxes((10,), [Box((0,), (5,)), Box((6,), (4,))])
        Traceback (most recent call last):
        ValueError: boxes do not cover the entire tensor: total volume 9 does not match tensor
        volume 10, no box covers [5:6]
    """
    shape = tuple(shape)
    if _are_stacked(shape, boxes):
        return
    columns = _columns(boxes)
    _check_bounds(shape, columns, boxes)
    if columns.cover((0,) * len(shape), shape):
        return
    _check_overlap(columns, boxes)
    volume, expected = sum([box.volume for box in boxes]), math.prod(shape)
    if volume != expected:
        raise ValueError(
            f"boxes do not cover the entire tensor: total volume {volume} does not match tensor "
            f"volume {expected}, no box covers {columns.first_gap(shape)}"
        )


def _are_stacked(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """True if the boxes are ranges of dim 0, in order: the usual case, and quickly checked."""
    if not shape or not boxes:
        return False
    rest, begin, zeros = shape[1:], 0, (0,) * (len(shape) - 1)
    for box in boxes:
        offsets, sizes = box.offsets, box.sizes
        if sizes[1:] != rest or offsets[1:] != zeros or offsets[:1] != (begin,):
            return False
        begin += sizes[0]
    return begin == shape[0]


def _columns(boxes: Sequence[Box]) -> BoxColumns:
    return BoxColumns([box.offsets for box in boxes], [box.sizes for box in boxes])


def _check_bounds(shape: tuple[int, ...], columns: BoxColumns, boxes: Sequence[Box]) -> None:
    if not boxes:
        return
    if boxes[0].ndim != len(shape):
        raise ValueError(
            f"a tensor of shape {shape} has {len(shape)} dims, but the boxes have {boxes[0].ndim}"
        )
    for dim, (extent, ends) in enumerate(zip(shape, columns.ends, strict=True)):
        last = max(ends, default=0)
        if last > extent:
            i = columns.positions[ends.index(last)]
            raise ValueError(
                f"box {i}, {boxes[i]}, is out of bounds: dim {dim} of a tensor of shape {shape} "
                f"ends at {extent}"
            )


def _check_overlap(columns: BoxColumns, boxes: Sequence[Box]) -> None:
    pair = columns.overlap()
    if pair is None:
        return
    i, j = pair
    a, b = boxes[i], boxes[j]
    raise ValueError(f"boxes {i} and {j} overlap: {a} and {b} share {a.intersection(b)}")
