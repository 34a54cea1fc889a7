"""Pictures of boxes in characters: the parts of a tensor, in proportion, with labels."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise, product
from typing import Protocol

from tilework.show.text import Styled

#: The numbers of cells without a box: rows that are left out, and the surroundings.
_LEFT_OUT, _OUTSIDE = -1, -2
#: By the sides from which lines come: above (1), below (2), left (4), right (8).
_GLYPHS = {0: " ", 3: "│", 12: "─", 5: "┘", 9: "└", 6: "┐", 10: "┌", 7: "┤", 11: "├", 13: "┴",
    14: "┬", 15: "┼"}  # fmt: skip
#: No cell is made wider than this for a label; longer labels are shortened.
_LABEL_WIDTH = 8
#: A row of average size takes this many lines, with the border, if there is room.
_LINES_PER_ROW = 3


class Region(Protocol):
    """A part of a tensor, as ``layout.Box`` is."""

    @property
    def offsets(self) -> Sequence[int]: ...

    @property
    def ends(self) -> Sequence[int]: ...

    @property
    def empty(self) -> bool: ...


@dataclass(frozen=True)
class Picture:
    """A tensor's parts as boxes, in proportion, but none too small to be seen.

    Two dims are drawn, sharded dims first. If more dims are sharded, several drawings show slices
    along the others.

    Args:
        shape: The tensor's shape.
        boxes: The parts, which do not overlap; empty ones are not drawn.
        labels: For each box the possible labels, the longest first.
        colours: For each box the colour.
        width: The maximum of characters across: wider pictures are no clearer.
        height: Lines of one drawing, unless there are too many rows.
        rows: The maximum of rows of boxes; the middle rows are left out if there are more.
        slices: The maximum of drawings.

    Example:
        >>> from tilework.layout import Box
        >>> boxes = [Box((0,), (6,)), Box((6,), (2,))]
        >>> for line in Picture((8,), boxes, [["0"], ["1"]], ["red", "blue"]).lines(17):
        ...     print("".join(text for text, _ in line))
        → dim 0
        0           6   8
        ┌───────────┬───┐
        │     0     │ 1 │
        └───────────┴───┘
    """

    shape: Sequence[int]
    boxes: Sequence[Region]
    labels: Sequence[Sequence[str]]
    colours: Sequence[str]
    width: int = 90
    height: int = 14
    rows: int = 12
    slices: int = 4

    def lines(self, width: int) -> list[list[Styled]]:
        """The picture, at most ``width`` wide; nothing for a tensor without elements."""
        full = {number: box for number, box in enumerate(self.boxes) if not box.empty}
        if not full:
            return []
        cuts = [
            sorted({0, n}.union(*((box.offsets[dim], box.ends[dim]) for box in full.values())))
            for dim, n in enumerate(self.shape)
        ]
        # The sharded dims come last, and the last two dims are drawn.
        order = sorted(range(len(self.shape)), key=lambda dim: (len(cuts[dim]) > 2, dim))
        dims, sliced = sorted(order[-2:]), [dim for dim in order[:-2] if len(cuts[dim]) > 2]
        lines = [[(self._caption(dims, sliced), "")]]
        drawn: set[int] = set()
        for place in islice(product(*(pairwise(cuts[dim]) for dim in sliced)), self.slices):
            if sliced:
                spans = {dim: f"{a}:{b}" for dim, (a, b) in zip(sliced, place, strict=True)}
                name = ", ".join(spans.get(dim, ":") for dim in range(len(self.shape)))
                lines.append([(f"[{name}]", "")])
            here = {number: box for number, box in full.items() if _meets(box, sliced, place)}
            drawing = _Drawing(self, dims, cuts, here, min(width, self.width))
            lines += drawing.lines()
            drawn |= drawing.spans.keys()
        missing = math.prod(len(cuts[dim]) - 1 for dim in sliced) - self.slices
        if missing > 0:
            lines.append([(f"… {missing:,} more slice{'s' * (missing > 1)}", "")])
        if len(drawn) < len(full):
            lines.append([(f"{len(drawn):,} of {len(full):,} shards are drawn", "")])
        return lines

    def _caption(self, dims: list[int], sliced: list[int]) -> str:
        words = [f"{arrow} dim {dim}" for arrow, dim in zip("↓→"[-len(dims) :], dims, strict=False)]
        rest = sorted(set(range(len(self.shape))) - {*dims, *sliced})
        words += [f"dim {dim} ({self.shape[dim]:,}) is not cut" for dim in rest]
        return "   ".join(words) or "a scalar"


def _meets(box: Region, sliced: list[int], place: Sequence[tuple[int, int]]) -> bool:
    starts = zip(sliced, place, strict=True)
    return all(box.offsets[dim] <= start < box.ends[dim] for dim, (start, _) in starts)


class _Axis:
    """A dim of a drawing, whose cells fill ``room``; one cell stands for the middle of many."""

    def __init__(self, cuts: list[int], least: int, room: int, most: int) -> None:
        lengths = [end - start for start, end in pairwise(cuts)]
        if len(lengths) > most:
            kept = most - 2
            cuts = [*cuts[: kept + 1], *cuts[-2:]]
            ends = [*lengths[:kept], lengths[-1]]
            lengths = [*lengths[:kept], max(1, sum(ends) // len(ends)), lengths[-1]]
        for target in range(max(room, 0), -1, -1):
            sizes = [max(least, round(target * n / sum(lengths)) - 1) for n in lengths]
            if sum(sizes) + len(sizes) <= room:
                break
        #: The indices between the cells, and the sizes of cells in characters.
        self.cuts, self.sizes = cuts, sizes
        #: The positions, in characters, of the lines before, between and after the cells.
        self.edges = [0, *accumulate(size + 1 for size in sizes)]

    def between(self, start: int, end: int) -> tuple[int, int]:
        """The cells between two indices of the dim: the first, and the number after the last."""
        return bisect_left(self.cuts, start), bisect_right(self.cuts, end) - 1

    def neighbours(self) -> list[tuple[int, int]]:
        """For each position in characters, the cells just before and just after it, from 1 on."""
        pairs = [(0, 1)]
        for cell, size in enumerate(self.sizes, 1):
            pairs += [(cell, cell)] * size + [(cell, cell + 1)]
        return pairs

    def ruler(self) -> str:
        """The line of indices above the drawing, as many as there is room."""
        ruler = [" "] * (self.edges[-1] + 1)
        marks = list(zip(self.edges, map(str, self.cuts), strict=True))
        for edge, text in (marks[0], marks[-1], *marks[1:-1]):
            start = max(0, min(edge - len(text) // 2, len(ruler) - len(text)))
            if not "".join(ruler[max(0, start - 1) : start + len(text) + 1]).strip():
                ruler[start : start + len(text)] = text
        return "".join(ruler).rstrip()


class _Drawing:
    """The drawing of a tensor of up to two dims, or of one slice of a tensor of more dims."""

    def __init__(
        self,
        picture: Picture,
        dims: Sequence[int],
        cuts: list[list[int]],
        boxes: Mapping[int, Region],
        width: int,
    ) -> None:
        self.picture, self.ndim = picture, len(dims)
        # A tensor of one dim is one cell high; a scalar is also one cell wide.
        missing = 2 - self.ndim
        down, across = [[0, 1]] * missing + [cuts[dim] for dim in dims]
        margin = 0 if missing else max(len(str(cut)) for cut in down) + 1
        least = min(_LABEL_WIDTH, max(len(picture.labels[number][-1]) for number in boxes))
        room = width - margin - 1
        height = 2 if missing else min(picture.height, _LINES_PER_ROW * (len(down) - 1))
        self.down = _Axis(down, 1, height, picture.rows)
        self.across = _Axis(across, least, room, max(3, room // (least + 1)))
        #: For each visible box the range of cells: from and to, down and across.
        self.spans: dict[int, tuple[int, int, int, int]] = {}
        for number, box in boxes.items():
            ranges = [(0, 1)] * missing + [(box.offsets[dim], box.ends[dim]) for dim in dims]
            top, bottom, left, right = (
                *self.down.between(*ranges[0]),
                *self.across.between(*ranges[1]),
            )
            if top < bottom and left < right:
                self.spans[number] = top, bottom, left, right

    def lines(self) -> Iterator[list[Styled]]:
        colours = self.picture.colours
        rows = self._characters()
        margins = [""] * len(rows)
        if self.ndim == 2:
            for edge, cut in zip(self.down.edges, self.down.cuts, strict=True):
                margins[edge] = f"{cut} "
        gutter = max(map(len, margins))
        if self.ndim:
            yield [(" " * gutter + self.across.ruler(), "")]
        for margin, row in zip(margins, rows, strict=True):
            runs = groupby(row, key=lambda character: character[1])
            line = [
                ("".join(text for text, _ in run), f"black on {colours[at]}" if at >= 0 else "")
                for at, run in runs
            ]
            yield [(margin.rjust(gutter), ""), *line]

    def _characters(self) -> list[list[tuple[str, int]]]:
        """All characters, each with the number of the box; negative outside of boxes."""
        grid, columns = self._grid(), self.across.neighbours()
        rows = []
        for above, below in self.down.neighbours():
            up, down = grid[above], grid[below]
            rows.append([_character(up[a], up[b], down[a], down[b]) for a, b in columns])
        for row, column, text in self._texts(grid):
            for at, letter in enumerate(text, column):
                rows[row][at] = letter, rows[row][at][1]
        return rows

    def _grid(self) -> list[list[int]]:
        """The number of the box in each cell, by row and column, with a frame of cells around."""
        n, m = len(self.down.sizes), len(self.across.sizes)
        frame = [_OUTSIDE] * (m + 2)
        inner = [[_OUTSIDE, *[_LEFT_OUT] * m, _OUTSIDE] for _ in range(n)]
        for number, (top, bottom, left, right) in self.spans.items():
            for row in inner[top:bottom]:
                row[left + 1 : right + 1] = [number] * (right - left)
        return [frame, *inner, frame]

    def _texts(self, grid: list[list[int]]) -> Iterator[tuple[int, int, str]]:
        for number, (top, bottom, left, right) in self.spans.items():
            width = self.across.edges[right] - self.across.edges[left] - 1
            labels = self.picture.labels[number]
            shortened = labels[-1][: width - 1] + "…"
            text = next((label for label in labels if len(label) <= width), shortened)
            yield *self._middle(top, bottom, left, right, len(text)), text
        for i, row in enumerate(grid[1:-1]):
            for j, number in enumerate(row[1:-1]):
                if number == _LEFT_OUT:
                    yield *self._middle(i, i + 1, j, j + 1, 1), "…"

    def _middle(self, top: int, bottom: int, left: int, right: int, width: int) -> tuple[int, int]:
        rows, columns = self.down.edges, self.across.edges
        column = (columns[left] + columns[right] + 1 - width) // 2
        return (rows[top] + rows[bottom]) // 2, max(column, columns[left] + 1)


def _character(a: int, b: int, c: int, d: int) -> tuple[str, int]:
    """The character between four cells: above left, above right, below left, below right."""
    lines = (a != b) + 2 * (c != d) + 4 * (a != c) + 8 * (b != d)
    return _GLYPHS[lines], _OUTSIDE if lines else a
