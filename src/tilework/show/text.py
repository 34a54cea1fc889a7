"""Text in styles, safe for terminals and HTML; colours; sizes in few letters."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

#: Text, and the name of a style in rich: "", "bold", a colour, or "black on" a colour.
Styled = tuple[str, str]

_COLOURS = ("#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bc80bd", "#ffed6f",
    "#a6cee3", "#fccde5", "#ccebc5", "#d9c7a0", "#bebada")  # fmt: skip


def colour(number: int) -> str:
    """A colour for a number; numbers take turns."""
    return _COLOURS[number % len(_COLOURS)]


def bytes_text(n: float) -> str:
    """A number of bytes in few letters.

    Example:
        >>> bytes_text(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:,.3g} TiB"


def count_text(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def run_texts(numbers: Iterable[int], to: str = "-", least: int = 2) -> list[str]:
    """Sorted numbers as texts; ``least`` or more consecutive ones by the first and the last.

    Example:
        >>> run_texts([0, 1, 2, 3, 6])
        ['0-3', '6']
    """
    texts: list[str] = []
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        texts += [f"{run[0]}{to}{run[-1]}"] if len(run) >= least else map(str, run)
    return texts


def printable(text: str) -> str:
    r"""The text with control characters and unencodable characters as escapes.

    Example:
        >>> printable("x\x1b[2J"), printable("a\nb\ud800")
        ('x\\x1b[2J', 'a\nb\\ud800')
    """
    if text.isprintable():
        return text
    safe = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(safe)


def html_of(styled: Styled) -> str:
    """Text in a style as HTML."""
    text, style = escape(styled[0]), styled[1]
    if style in ("", "bold"):
        return f"<b>{text}</b>" if style else text
    _, on, colour = style.rpartition("black on ")
    css = f"color:#000;background:{colour}" if on else f"color:{colour}"
    return f'<span style="{css}">{text}</span>'
