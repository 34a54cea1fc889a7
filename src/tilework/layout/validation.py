"""Whether boxes overlap, and whether they cover a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilework.layout.box import Box, whole_box


def check_disjoint(boxes: Sequence[Box]) -> None:
    """No two boxes share an element.

    Raises:
        ValueError: Two overlap; the message names both.

    Example:
        >>> check_disjoint([Box((0,), (5,)), Box((4,), (5,))])
        Traceback (most recent call last):
        ValueError: boxes 0 and 1 overlap: [0:5] and [4:9] share [4:5]
    """
    for j, b in enumerate(boxes):
        for i, a in enumerate(boxes[:j]):
            if (shared := a.intersection(b)) is not None:
                raise ValueError(f"boxes {i} and {j} overlap: {a} and {b} share {shared}")


def check_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """The boxes cover the shape, each element once. Empty boxes may be anywhere.

    Raises:
        ValueError: A box is out of bounds, two overlap, or a part is not covered; the message
            names them.

    Example:
        >>> check_boxes((10,), [Box((0,), (5,)), Box((5,), (5,))])
    """
    whole = whole_box(shape)
    for i, box in enumerate(boxes):
        if box.ndim != whole.ndim:
            raise ValueError(f"box {i}, {box}, has {box.ndim} dims, the tensor {whole.ndim}")
        if not whole.contains(box):
            raise ValueError(f"box {i}, {box}, is out of bounds of the tensor, {whole}")
    check_disjoint(boxes)
    volume = sum(box.volume for box in boxes)
    if volume != math.prod(shape):
        raise ValueError(
            f"the boxes' total volume of {volume} does not match tensor volume {math.prod(shape)}"
        )
