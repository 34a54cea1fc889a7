"""Pictures of figures: ``--plot FILE.svg`` of every program here. Light and dark."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from tilework.show import svg

_COLOURS = ("#14b8a6", "#f59e0b", "#60a5fa", "#f472b6", "#a78bfa", "#9ca3af", "#84cc16")
_LEFT, _WIDTH, _RIGHT, _BAR, _GAP = 250, 520, 80, 12, 8
#: From the headline of a chart to the first bar.
_HEAD = 66
#: Bars of values that differ by more are drawn by their logarithms.
_MOST_ON_A_LINE = 30.0
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


@dataclass(frozen=True)
class Chart:
    """Bars for each row.

    Args:
        title: The headline, with the unit.
        rows: A label, and a value of each contestant that has one.
    """

    title: str
    rows: Sequence[tuple[str, Mapping[str, float]]]


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    """Let a program take ``--plot FILE``."""
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write a picture there")


def draw(path: Path | None, *charts: Chart) -> None:
    """Write the charts below each other to a file; nothing without one."""
    if path is not None:
        path.write_text(picture(charts))


def chart(table: Table, columns: Sequence[str], labels: int = 1) -> Chart:
    """The chart of some columns of a table.

    Args:
        table: A table that was printed.
        columns: The heads of those with values.
        labels: So many columns, the first ones, name a row; an empty first one is as above.
    """
    heads = [Text.from_markup(str(column.header)).plain for column in table.columns]
    cells = [
        [Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns
    ]
    rows: list[tuple[str, dict[str, float]]] = []
    first = ""
    for row in zip(*cells, strict=True):
        first = row[0] or first
        parts = zip((first, *row[1:labels]), heads, strict=False)
        label = ", ".join(_told(cell, head) for cell, head in parts if cell)
        found = ((name, _NUMBER.search(row[heads.index(name)])) for name in columns)
        values = {name: float(match[0].replace(",", "")) for name, match in found if match}
        rows.append((label, values))
    return Chart(str(table.title or heads[0]), rows)


def _told(cell: str, head: str) -> str:
    """A cell of a label: a number with what it counts."""
    return f"{cell} {head}" if cell.replace(",", "").isdecimal() else cell


def picture(charts: Sequence[Chart]) -> str:
    """An SVG of the charts."""
    names = list(dict.fromkeys(n for each in charts for _, values in each.rows for n in values))
    kinds = {name: f"bar{number}" for number, name in enumerate(names)}
    parts: list[str] = []
    top = 0.0
    for each in charts:
        parts += _bars(each, kinds, top)
        top += _height(each)
    colours = {kind: _COLOURS[at % len(_COLOURS)] for at, kind in enumerate(kinds.values())}
    return svg.document(_LEFT + _WIDTH + _RIGHT, top, colours, parts)


def _height(of: Chart) -> float:
    return _HEAD + sum(_BAR * len(values) + _GAP for _, values in of.rows) + 12


def _bars(of: Chart, kinds: Mapping[str, str], top: float) -> Iterator[str]:
    yield svg.words(10, top + 20, of.title, "title")
    shown = {name for _, values in of.rows for name in values}
    yield from svg.legend(10, top + 40, {k: name for name, k in kinds.items() if name in shown})
    sizes = [value for _, values in of.rows for value in values.values() if value > 0]
    if not sizes:
        return
    least, most = min(sizes), max(sizes)
    logarithmic = most / least > _MOST_ON_A_LINE
    begin = 10.0 ** (math.ceil(math.log10(least)) - 1)

    def across(value: float) -> float:
        if not logarithmic:
            return _WIDTH * max(value, 0.0) / most
        return _WIDTH * math.log10(max(value, begin) / begin) / math.log10(most / begin)

    if logarithmic:
        marks = [begin * 10.0**n for n in range(int(math.log10(most / begin)) + 1)]
    else:
        marks = svg.round_numbers(most)
    ticks = [(_LEFT + across(mark), f"{mark:,.10g}") for mark in marks]
    yield from svg.axis(ticks, top + _HEAD - 4, top + _height(of) - 12)
    y = top + _HEAD
    for label, values in of.rows:
        yield svg.words(_LEFT - 8, y + _BAR * len(values) / 2 + 4, label, "end")
        for name, value in values.items():
            short = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
            width = max(1.0, across(value))
            yield svg.bar(kinds[name], _LEFT, y, width, _BAR - 1, f"{name}: {short}")
            yield svg.words(_LEFT + width + 5, y + _BAR - 2, short)
            y += _BAR
        y += _GAP
