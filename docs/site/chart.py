"""The chart of README.md's table of collectives: ``python docs/site/chart.py`` draws it again."""

from __future__ import annotations

import math
import re
from pathlib import Path

from tilework.tiled import svg

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs/collectives.svg"
#: As the table has them: operation, size, tilework's time, then each peer's "time (ratio)".
_ROW = re.compile(
    r"^\| (\w+) \| ([^|]+?) \| ([\d.,]+) \| [\d.,]+ \(([\d.]+)\) \| [\d.,]+ \(([\d.]+)\) \|", re.M
)
_COLOURS = {"gloo": "#f59e0b", "mpi": "#60a5fa"}
_LEFT, _WIDTH, _ROW_HEIGHT, _TOP = 150, 560, 36, 64


def chart(table: str) -> str:
    """An SVG of how many times as long as tilework the peers take, on a logarithmic axis."""
    rows = _ROW.findall(table)
    largest = max(float(value) for row in rows for value in row[3:])
    scale = _WIDTH / math.log10(largest * 10)
    height = _TOP + _ROW_HEIGHT * len(rows) + 10

    def across(ratio: float) -> float:
        return _LEFT + scale * math.log10(max(ratio, 0.1) * 10)

    ticks = [(across(tick), f"{tick:g}x") for tick in (0.1, 1, 10, 100)]
    parts = [
        svg.words(10, 20, "Times as long as tilework, 2 ranks on one host", "title"),
        *svg.legend(_LEFT, 41, {"gloo": "Gloo", "mpi": "Open MPI"}),
        *svg.axis(ticks, _TOP, height - 6),
    ]
    for number, (operation, size, _, *ratios) in enumerate(rows):
        y = _TOP + 6 + _ROW_HEIGHT * number
        name = operation if not size[0].isdigit() else f"{operation}, {size}"
        parts.append(svg.words(_LEFT - 8, y + 17, name, "end"))
        for peer, (kind, ratio) in enumerate(zip(("gloo", "mpi"), ratios, strict=True)):
            end, begin = across(float(ratio)), across(1)
            x, width = min(begin, end), max(abs(end - begin), 1.0)
            top = y + 13 * peer
            parts.append(svg.bar(kind, round(x), top, round(width), 11))
            parts.append(svg.words(round(max(begin, end)) + 5, top + 10, ratio))
    return svg.document(770, height, _COLOURS, parts)


if __name__ == "__main__":
    CHART.write_text(chart((ROOT / "README.md").read_text()))
