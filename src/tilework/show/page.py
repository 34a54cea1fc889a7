"""Pages: lines, pictures and tables, for terminals, plain text and notebooks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilework.show.picture import Picture
from tilework.show.text import Styled, html_of, printable

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


if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

#: Replacements for outputs without Unicode.
_ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼…↓→█", "|-+++++++++.v>#")
#: The width in notebooks and plain text; and of tables in plain text, whose rows are not folded.
_PLAIN, _WHOLE = 80, 10_000
#: Lines close enough for the boxes' sides to touch.
_PRE = (
    "margin:0;padding:0;line-height:1.2;overflow-x:auto;white-space:pre;"
    "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;color:inherit;background:none"
)


class Page:
    r"""Lines, pictures and tables, one below the other. Text is plain, and rich draws colours.

    Args:
        parts: Lines of text, perhaps in a style, pictures, and tables.

    Example:
        >>> page = Page(("a<b", "bold"), "1")
        >>> print(page)
        a<b
        1
        >>> page.html().partition(">")[2]
        '<b>a&lt;b</b>\n1</pre>'
    """

    def __init__(self, *parts: str | Styled | Picture | TextTable) -> None:
        self.parts = parts

    def print(self) -> None:
        """Print the page for the terminal's width.

        In a pipe, or with NO_COLOR set, there are no colours; in a pipe, rows are not folded. If
        the output's encoding is not a Unicode encoding, lines are drawn with ASCII characters.
        """
        from rich.console import Console

        console = Console(highlight=False)
        console.print(self, soft_wrap=not (console.is_terminal or console.is_jupyter))

    def __str__(self) -> str:
        lines = self._lines(_PLAIN, _WHOLE)
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)

    def html(self) -> str:
        """The page for a notebook: no script, colours of the page, light or dark."""
        lines = self._lines(_PLAIN, _WHOLE)
        text = "\n".join("".join(map(html_of, line)) for line in lines)
        return f'<pre style="{_PRE}">{text}</pre>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        letters = _ASCII if options.ascii_only else {}
        whole = _WHOLE if options.no_wrap else options.max_width
        for line in self._lines(options.max_width, whole):
            styled = ((text.translate(letters), style) for text, style in line)
            text = Text.assemble(*styled, overflow=options.overflow or "fold")
            text.rstrip()
            yield text

    def _lines(self, width: int, table_width: int) -> Iterator[Sequence[Styled]]:
        for part in self.parts:
            if isinstance(part, str | tuple):
                lines: Iterable[Sequence[Styled]] = [
                    [(part, "") if isinstance(part, str) else part]
                ]
            else:
                lines = part.lines(table_width if isinstance(part, TextTable) else width)
            yield from ([(printable(text), style) for text, style in line] for line in lines)


class Shown(ABC):
    """An object that ``print``, rich and notebooks show as a page."""

    @abstractmethod
    def __rich__(self) -> Page: ...

    def __str__(self) -> str:
        return str(self.__rich__())

    def _repr_html_(self) -> str:
        return self.__rich__().html()
