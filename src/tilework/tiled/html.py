"""Pictures and tables as HTML for notebooks: no script, colours of the page, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tilework.tiled.terminal import Styled, StyledLine, printable

#: Characters across a picture in a notebook.
WIDTH = 80
#: Lines close enough for the boxes' sides to touch.
_PICTURE = (
    "margin:0;padding:0;line-height:1.2;overflow-x:auto;white-space:pre;"
    "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;color:inherit;background:none"
)


def lines_html(lines: Iterable[StyledLine]) -> str:
    """The lines that a terminal shows, as HTML.

    Example:
        >>> print(lines_html([[("a<b", "bold"), (" 1", "black on #8dd3c7")]]).partition(">")[2])
        <b>a&lt;b</b><span style="color:#000;background:#8dd3c7"> 1</span></pre>
    """
    text = "\n".join("".join(map(_span, line)) for line in lines)
    return f'<pre style="{_PICTURE}">{text}</pre>'


def table_html(
    summary: str, titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> str:
    """A line of text and, if there are rows, a table, as HTML.

    Args:
        summary: The line above.
        titles: The columns' heads.
        rows: A text for each column.
        numbers: The columns that are aligned to the right.

    Example:
        >>> table_html("1 row", ["name"], [["x & y"]]).endswith("x &amp; y</td></tr></table>")
        True
    """
    sides = ["right" if at in set(numbers) else "left" for at in range(len(titles))]

    def row(kind: str, words: Sequence[str]) -> str:
        cells = (
            f'<{kind} style="text-align:{side}">{_text(word)}</{kind}>'
            for side, word in zip(sides, words, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(row("td", words) for words in rows)
    table = f"<table>{row('th', titles)}{body}</table>" if body else ""
    return f"<div>{_text(summary)}</div>{table}"


def _text(text: str) -> str:
    return escape(printable(text))


def _span(styled: Styled) -> str:
    """Text in a style as HTML. The styles are "", "bold", a colour, and "black on" a colour."""
    text, style = _text(styled[0]), styled[1]
    if style == "bold":
        return f"<b>{text}</b>"
    _, on, colour = style.rpartition("black on ")
    if not colour:
        return text
    css = f"color:#000;background:{colour}" if on else f"color:{colour}"
    return f'<span style="{css}">{text}</span>'
