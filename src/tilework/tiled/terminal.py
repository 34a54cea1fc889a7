"""Text with styles for terminals: the common part of the pictures of both kinds of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tilework.tiled.picture import Line

#: Text, and the name of a style in rich.
Styled = tuple[str, str]
StyledLine = list[Styled]

COLOURS = ("#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bc80bd", "#ffed6f",
    "#a6cee3", "#fccde5", "#ccebc5", "#d9c7a0", "#bebada")  # fmt: skip
#: The maximum width: wider pictures are no clearer.
_MAX_WIDTH = 90
#: Replacements for outputs without Unicode.
_ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼…↓→█", "|-+++++++++.v>#")


def print_styled(render: Callable[[int], Iterable[StyledLine]], rows: bool = False) -> None:
    """Print the lines that ``render`` gives for the terminal's width.

    In a pipe, or with NO_COLOR set, the text is printed without colours. If the output's encoding
    is not a Unicode encoding, lines are drawn with ASCII characters.

    Args:
        render: Makes the lines for a width.
        rows: True for rows of a table: in a pipe, rows are not wrapped.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    unicode = console.encoding.lower().startswith("utf")
    for line in render(min(console.width, _MAX_WIDTH)):
        if not unicode:
            line = [(text.translate(_ASCII), style) for text, style in line]
        line = [(printable(text), style) for text, style in line]
        whole = rows and not console.is_terminal
        console.print(Text.assemble(*line), overflow=None if whole else "fold", soft_wrap=whole)


def printable(text: str) -> str:
    r"""The text with control characters and unencodable characters as escapes.

    Example:
        >>> printable("x\x1b[2J"), printable("a\nb\ud800")
        ('x\\x1b[2J', 'a\nb\\ud800')
    """
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(letters)


def coloured_picture(lines: Iterable[Line], colour_of: Callable[[int], str]) -> list[StyledLine]:
    """The picture with each box in the colour that ``colour_of`` gives for the box."""
    return [
        [(text, "" if box is None else f"black on {colour_of(box)}") for text, box in line]
        for line in lines
    ]


def in_columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The rows as lines of aligned columns, the first two to the left, others to the right.

    If four columns are too wide for ``width``, the last is left out, then the second.

    Example:
        >>> in_columns([["rank", "at", "bytes"], ["0", "1", "1.5 KiB"]], 40)
        ['rank  at    bytes', '0     1   1.5 KiB']
    """
    columns = []
    for number, words in enumerate(zip(*rows, strict=True)):
        longest = max(map(len, words))
        aligned = [word.ljust(longest) if number < 2 else word.rjust(longest) for word in words]
        columns.append(aligned)
    for dropped in (3, 1):
        if sum(2 + len(column[0]) for column in columns) - 2 > width:
            del columns[dropped]
    return ["  ".join(words) for words in zip(*columns, strict=True)]


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
