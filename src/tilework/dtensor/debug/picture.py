"""A DTensor's layout in styled lines: which rank holds which part, and a table of the ranks."""

from __future__ import annotations

import math

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug.formatting import headline
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Box
from tilework.tiled import (
    COLOURS,
    PictureSize,
    StyledLine,
    bytes_text,
    coloured_picture,
    draw,
    in_columns,
)

#: The most ranks that the table lists; it leaves out later ranks.
_LISTED = 32


def layout_lines(tensor: DTensorBase, width: int) -> list[StyledLine]:
    """The headline, the picture and the table of a tensor, at most ``width`` wide. Local."""
    return [
        [(headline(tensor), "bold")],
        [],
        *_picture(tensor._spec, width),
        [],
        *_table(tensor, width),
    ]


def _holders(spec: DTensorSpec) -> dict[Box, list[list[int]]]:
    """The ranks that hold each box: a single list, or a list for each partial value."""
    holders: dict[Box, list[list[int]]] = {}
    for tile in spec.tiling.tiles:
        holders.setdefault(tile.box, []).append(list(tile.owners))
    return holders


def _picture(spec: DTensorSpec, width: int) -> list[StyledLine]:
    holders = _holders(spec)
    labels = []
    for partials in holders.values():
        text = "+".join(
            ", ".join(map(str, ranks))
            if len(partials) == 1
            else f"({', '.join(map(str, ranks))})"
            if len(ranks) > 1
            else str(ranks[0])
            for ranks in partials
        )
        labels.append((text,))
    lines = draw(spec.shape, list(holders), labels, PictureSize(width, 14, 12, 4))
    return coloured_picture(lines, lambda box: COLOURS[box % len(COLOURS)])


def _table(tensor: DTensorBase, width: int) -> list[StyledLine]:
    spec = tensor._spec
    mesh, itemsize = spec.mesh.spec, tensor._local_tensor.dtype.itemsize
    boxes, here = list(_holders(spec)), spec.mesh.get_coordinate()
    names = mesh.names or tuple(map(str, range(mesh.ndim)))
    rows, colours = [("rank", " ".join(names), "bytes", "has")], [""]
    for rank in mesh.ranks[:_LISTED]:
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        box = spec.box_at(coordinate)
        this = " (this)" if list(coordinate) == here else ""
        at = " ".join(str(i).rjust(len(name)) for i, name in zip(coordinate, names, strict=True))
        rows.append((f"{rank}{this}", at, bytes_text(math.prod(box.sizes) * itemsize), str(box)))
        colours.append(COLOURS[boxes.index(box) % len(COLOURS)] if box in boxes else "")
    lines: list[StyledLine] = []
    for colour, text in zip(colours, in_columns(rows, width - 4), strict=True):
        style = "bold" if not lines else ""
        lines.append([("██  " if colour else "    ", colour), (text.rstrip(), style)])
    left = len(mesh.ranks) - _LISTED
    return [*lines, [(f"    … {left} more ranks", "")]] if left > 0 else lines
