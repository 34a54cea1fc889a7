"""Pictures of boxes in characters: the shards of a tensor. Pure text; colours come later."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise, product

from tilework.layout import Box

#: Text, and the number of the box that it lies in; None outside of boxes.
Span = tuple[str, int | None]
Line = list[Span]

#: The numbers of cells without a box: rows that are left out, and the surroundings.
_LEFT_OUT, _OUTSIDE = -1, -2
#: By the sides from which lines come: above (1), below (2), left (4), right (8).
_GLYPHS = {0: " ", 3: "│", 12: "─", 5: "┘", 9: "└", 6: "┐", 10: "┌", 7: "┤", 11: "├", 13: "┴",
    14: "┬", 15: "┼"}  # fmt: skip
#: No cell is made wider than this for a label; longer labels are shortened.
_LABEL_WIDTH = 8
#: A row of average size takes this many lines, with the border, if there is room.
_LINES_PER_ROW = 3


@dataclass(frozen=True)
class PictureSize:
    """The limits of a picture.

    Args:
        width: Characters across.
        height: Lines of one picture, unless there are too many rows.
        rows: The maximum of rows of boxes; the middle rows are left out if there are more.
        slices: The maximum of pictures, for tensors that are sharded along more than two dims.
    """

    width: int
    height: int
    rows: int
    slices: int


def draw(
    shape: Sequence[int], boxes: Sequence[Box], labels: Sequence[Sequence[str]], size: PictureSize
) -> list[Line]:
    """The lines of the picture, with boxes in proportion, but none too small to be seen.

    Two dims are drawn, sharded dims first. If more dims are sharded, several pictures show slices
    along the others.

    Args:
        shape: The tensor's shape.
        boxes: The shards, which do not overlap; empty ones are not drawn.
        labels: For each box the possible labels, the longest first.
        size: The limits of the picture.

    Example:
        >>> boxes = [Box((0,), (6,)), Box((6,), (2,))]
        >>> for line in draw((8,), boxes, [["0"], ["1"]], PictureSize(17, 9, 6, 2)):
        ...     print("".join(text for text, _ in line))
        → dim 0
        0           6   8
        ┌───────────┬───┐
        │     0     │ 1 │
        └───────────┴───┘
    """
    full = {number for number, box in enumerate(boxes) if not box.empty}
    if not full:
        return []
    cuts = [_cuts(n, dim, boxes) for dim, n in enumerate(shape)]
    # The sharded dims come last, and the last two dims are drawn.
    order = sorted(range(len(shape)), key=lambda dim: (len(cuts[dim]) > 2, dim))
    down_across, sliced = sorted(order[-2:]), [d for d in order[:-2] if len(cuts[d]) > 2]
    lines: list[Line] = [[(_caption(shape, down_across, sliced), None)]]
    drawn: set[int] = set()
    for place in islice(product(*(pairwise(cuts[dim]) for dim in sliced)), size.slices):
        if sliced:
            lines.append([(_slice_name(len(shape), sliced, place), None)])
        here = {i: boxes[i] for i in sorted(full) if _meets(boxes[i], sliced, place)}
        picture = _picture(down_across, cuts, here, labels, size)
        lines += picture.lines()
        drawn |= picture.spans.keys()
    missing = math.prod(len(cuts[dim]) - 1 for dim in sliced) - size.slices
    if missing > 0:
        lines.append([(f"… {missing:,} more slice{'s' * (missing > 1)}", None)])
    if len(drawn) < len(full):
        lines.append([(f"{len(drawn):,} of {len(full):,} shards are drawn", None)])
    return lines


def _cuts(length: int, dim: int, boxes: Sequence[Box]) -> list[int]:
    """The indices at which boxes begin and end along a dim."""
    cuts = {0, length}
    for box in boxes:
        if not box.empty:
            cuts |= {box.offsets[dim], box.offsets[dim] + box.sizes[dim]}
    return sorted(cuts)


def _caption(shape: Sequence[int], down_across: list[int], sliced: list[int]) -> str:
    arrows = ("↓", "→")[-len(down_across) :] if down_across else ()
    words = [f"{arrow} dim {dim}" for arrow, dim in zip(arrows, down_across, strict=True)]
    rest = set(range(len(shape))) - {*down_across, *sliced}
    words += [f"dim {dim} ({shape[dim]:,}) is not cut" for dim in sorted(rest)]
    return "   ".join(words) or "a scalar"


def _slice_name(ndim: int, sliced: list[int], place: Sequence[tuple[int, int]]) -> str:
    spans = {dim: f"{start}:{end}" for dim, (start, end) in zip(sliced, place, strict=True)}
    return f"[{', '.join(spans.get(dim, ':') for dim in range(ndim))}]"


def _meets(box: Box, sliced: list[int], place: Sequence[tuple[int, int]]) -> bool:
    """True if the box and the slice overlap."""
    return all(
        box.offsets[dim] <= start < box.offsets[dim] + box.sizes[dim]
        for dim, (start, _) in zip(sliced, place, strict=True)
    )


@dataclass(frozen=True)
class _Axis:
    """A dim of a picture: the cells between neighbouring cuts."""

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]  # of the cells, in characters

    @cached_property
    def edges(self) -> list[int]:
        """The positions, in characters, of the lines before, between and after the cells."""
        return [0, *accumulate(size + 1 for size in self.sizes)]

    def between(self, start: int, end: int) -> tuple[int, int]:
        """The cells between two indices of the dim: the first, and the number after the last."""
        return bisect_left(self.cuts, start), bisect_right(self.cuts, end) - 1

    def neighbours(self) -> list[tuple[int, int]]:
        """For each position in characters, the cells just before and just after it, from 1 on."""
        pairs = [(0, 1)]
        for cell, size in enumerate(self.sizes, 1):
            pairs += [(cell, cell)] * size + [(cell, cell + 1)]
        return pairs


def _axis(cuts: list[int], least: int, room: int, most: int) -> _Axis:
    """Cells in proportion, at least ``least`` characters each, that fill ``room`` with their lines.

    If there are more than ``most`` cells, one cell of average size stands for the middle ones.
    """
    lengths = [end - start for start, end in pairwise(cuts)]
    if len(lengths) > most:
        kept = most - 2
        cuts = [*cuts[: kept + 1], *cuts[-2:]]
        ends = [*lengths[:kept], lengths[-1]]
        lengths = [*lengths[:kept], max(1, sum(ends) // len(ends)), lengths[-1]]
    sizes = [least] * len(lengths)
    for target in range(room, 0, -1):
        scaled = [max(least, round(target * n / sum(lengths)) - 1) for n in lengths]
        if sum(scaled) + len(scaled) <= room:
            sizes = scaled
            break
    return _Axis(tuple(cuts), tuple(sizes))


@dataclass(frozen=True)
class _Picture:
    """The picture of a tensor of up to two dims, or of one slice of a tensor of more dims."""

    #: The first of two dims. For a tensor of fewer dims, a single cell.
    down: _Axis
    #: The last dim. For a scalar, a single cell.
    across: _Axis
    #: For each visible box the range of cells: from and to, down and across.
    spans: dict[int, tuple[int, int, int, int]]
    #: For each visible box the possible labels, the longest first.
    labels: dict[int, Sequence[str]]
    ndim: int  # of the tensor, at most 2

    @cached_property
    def grid(self) -> list[list[int]]:
        """The number of the box in each cell, by row and column, with a frame of cells around."""
        n, m = len(self.down.sizes), len(self.across.sizes)
        grid = [[_OUTSIDE] * (m + 2) for _ in range(n + 2)]
        for row in grid[1:-1]:
            row[1:-1] = [_LEFT_OUT] * m
        for number, (top, bottom, left, right) in self.spans.items():
            for row in grid[top + 1 : bottom + 1]:
                row[left + 1 : right + 1] = [number] * (right - left)
        return grid

    def lines(self) -> list[Line]:
        """The picture, with the numbers along the dims."""
        body = [_spans_of(row) for row in self._characters()]
        if self.ndim == 0:
            return body
        margins = [""] * len(body)
        if self.ndim == 2:
            for edge, cut in zip(self.down.edges, self.down.cuts, strict=True):
                margins[edge] = f"{cut} "
        gutter = max(map(len, margins))
        ruler = " " * gutter + _ruler(self.across)
        rows = zip(margins, body, strict=True)
        return [[(ruler, None)], *([(margin.rjust(gutter), None), *row] for margin, row in rows)]

    def _characters(self) -> list[list[tuple[str, int | None]]]:
        """All characters, each with the number of the box."""
        columns = self.across.neighbours()
        rows = []
        for above, below in self.down.neighbours():
            up, down = self.grid[above], self.grid[below]
            rows.append([_character(up[a], up[b], down[a], down[b]) for a, b in columns])
        for row, column, text in self._texts():
            for at, letter in enumerate(text, column):
                rows[row][at] = letter, rows[row][at][1]
        return rows

    def _texts(self) -> list[tuple[int, int, str]]:
        """The row, column and text of each label."""
        texts = []
        for number, (top, bottom, left, right) in self.spans.items():
            width = self.across.edges[right] - self.across.edges[left] - 1
            text = next((label for label in self.labels[number] if len(label) <= width), None)
            if text is None:
                text = self.labels[number][-1][: width - 1] + "…"
            texts.append((*self._middle(top, bottom, left, right, len(text)), text))
        for i, row in enumerate(self.grid[1:-1]):
            for j, number in enumerate(row[1:-1]):
                if number == _LEFT_OUT:
                    texts.append((*self._middle(i, i + 1, j, j + 1, 1), "…"))
        return texts

    def _middle(self, top: int, bottom: int, left: int, right: int, width: int) -> tuple[int, int]:
        rows, columns = self.down.edges, self.across.edges
        column = (columns[left] + columns[right] + 1 - width) // 2
        return (rows[top] + rows[bottom]) // 2, max(column, columns[left] + 1)


def _picture(
    dims: list[int],
    cuts: list[list[int]],
    boxes: dict[int, Box],
    labels: Sequence[Sequence[str]],
    size: PictureSize,
) -> _Picture:
    # A tensor of one dim is one cell high; a scalar is also one cell wide.
    missing = 2 - len(dims)
    down_cuts, across_cuts = [[0, 1]] * missing + [cuts[dim] for dim in dims]
    margin = max(len(str(cut)) for cut in down_cuts) + 1 if not missing else 0
    least = min(_LABEL_WIDTH, max(len(labels[number][-1]) for number in boxes))
    width = size.width - margin - 1
    across = _axis(across_cuts, least, width, max(3, width // (least + 1)))
    height = 2 if missing else min(size.height, _LINES_PER_ROW * (len(down_cuts) - 1))
    down = _axis(down_cuts, 1, height, size.rows)
    spans = {}
    for number, box in boxes.items():
        ranges = [(0, 1)] * missing + [(box.offsets[dim], box.ends[dim]) for dim in dims]
        top, bottom = down.between(*ranges[0])
        left, right = across.between(*ranges[1])
        if top < bottom and left < right:
            spans[number] = (top, bottom, left, right)
    return _Picture(down, across, spans, {i: labels[i] for i in spans}, len(dims))


def _character(a: int, b: int, c: int, d: int) -> tuple[str, int | None]:
    """The character between four cells: above left, above right, below left, below right."""
    lines = (a != b) + 2 * (c != d) + 4 * (a != c) + 8 * (b != d)
    return _GLYPHS[lines], None if lines or a < 0 else a


def _spans_of(row: list[tuple[str, int | None]]) -> Line:
    """A row of characters as spans: neighbouring characters of the same box are one text."""
    return [
        ("".join(letter for letter, _ in run), number)
        for number, run in groupby(row, key=lambda character: character[1])
    ]


def _ruler(axis: _Axis) -> str:
    """The line of indices above the picture, as many as there is room."""
    ruler = [" "] * (axis.edges[-1] + 1)
    marks = list(zip(axis.edges, map(str, axis.cuts), strict=True))
    for edge, text in (marks[0], marks[-1], *marks[1:-1]):
        start = max(0, min(edge - len(text) // 2, len(ruler) - len(text)))
        if not "".join(ruler[max(0, start - 1) : start + len(text) + 1]).strip():
            ruler[start : start + len(text)] = text
    return "".join(ruler).rstrip()
