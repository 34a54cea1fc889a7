"""Tables: rows of texts, colours and bars under titles."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tilework.show.text import Styled

#: The maximum length of bars, in characters, and the least room in which they are drawn.
_BAR_WIDTH, _BAR_LEAST = 20, 5


@dataclass(frozen=True)
class Bar:
    """A cell with a bar: a share of the longest bar, from 0 to 1, in a colour."""

    share: float
    colour: str


@dataclass(frozen=True)
class TextTable:
    """Rows under titles.

    Args:
        titles: The columns' heads.
        rows: A cell for each column: text, text in a style, or, in the last column, a bar.
        numbers: The columns that are aligned to the right.
        optional: Columns that are left out, in this order, where there is no room for them.

    Example:
        >>> from tilework.show import Page
        >>> print(Page(TextTable(("rank", "bytes"), [("0", "128 B"), ("1", "8 B")], {1})))
        rank  bytes
        0     128 B
        1       8 B
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str | Styled | Bar]]
    numbers: Collection[int] = ()
    optional: Sequence[int] = ()

    def lines(self, width: int) -> Iterator[Sequence[Styled]]:
        """A line for the titles, if there are rows, and for each row.

        They are wider than ``width`` where columns that are not optional are.
        """
        rows = [[(title, "bold") for title in self.titles], *self.rows] if self.rows else []
        columns = zip(*([len(_styled(cell)[0]) for cell in row] for row in rows), strict=True)
        sizes = [max(column) + 2 for column in columns]
        for column in self.optional:
            if sum(sizes) > width + 2:
                sizes[column] = 0
        room = min(_BAR_WIDTH, width + 2 - sum(sizes))
        for row in rows:
            yield [
                _styled(cell, room if room >= _BAR_LEAST else 0, sizes[at], at in self.numbers)
                for at, cell in enumerate(row)
                if sizes[at]
            ]


def _styled(cell: str | Styled | Bar, room: int = 0, size: int = 0, right: bool = False) -> Styled:
    """A cell as text that fills a column of this size, with a gap; a bar fills the room."""
    if isinstance(cell, Bar):
        return "█" * math.ceil(cell.share * room), cell.colour
    text, style = (cell, "") if isinstance(cell, str) else cell
    return f"{text:>{size - 2}}  " if right else text.ljust(size), style
