"""The chart of README.md's table of collectives: ``python docs/site/chart.py`` draws it again."""

from __future__ import annotations

import math
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs/collectives.svg"
#: As the table has them: operation, size, tilework's time, then each peer's "time (ratio)".
_ROW = re.compile(
    r"^\| (\w+) \| ([^|]+?) \| ([\d.,]+) \| [\d.,]+ \(([\d.]+)\) \| [\d.,]+ \(([\d.]+)\) \|", re.M
)
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #4b5563 }
  .title { font: 600 14px system-ui, sans-serif; fill: #111827 }
  .end { text-anchor: end } .middle { text-anchor: middle }
  .gloo { fill: #f59e0b } .mpi { fill: #60a5fa } line { stroke: #9ca3af; stroke-opacity: .5 }
  @media (prefers-color-scheme: dark) { text { fill: #c3c9d4 } .title { fill: #f3f4f6 } }
"""
_LEFT, _WIDTH, _ROW_HEIGHT, _TOP = 150, 560, 36, 64


def chart(table: str) -> str:
    """An SVG of how many times as long as tilework the peers take, on a logarithmic axis."""
    rows = _ROW.findall(table)
    largest = max(float(value) for row in rows for value in row[3:])
    scale = _WIDTH / math.log10(largest * 10)
    height = _TOP + _ROW_HEIGHT * len(rows) + 10

    def across(ratio: float) -> float:
        return _LEFT + scale * math.log10(max(ratio, 0.1) * 10)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 {height}" width="770">',
        f"<style>{_STYLE}</style>",
        '<text class="title" x="10" y="20">Times as long as tilework, 2 ranks on one host</text>',
        f'<rect class="gloo" x="{_LEFT}" y="30" width="12" height="12"/>'
        f'<text x="{_LEFT + 18}" y="41">Gloo</text>',
        f'<rect class="mpi" x="{_LEFT + 80}" y="30" width="12" height="12"/>'
        f'<text x="{_LEFT + 98}" y="41">Open MPI</text>',
    ]
    for tick in (0.1, 1, 10, 100):
        x = across(tick)
        lines.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{_TOP}" y2="{height - 6}"/>')
        lines.append(f'<text class="middle" x="{x:.0f}" y="{_TOP - 4}">{tick:g}x</text>')
    for number, (operation, size, _, *ratios) in enumerate(rows):
        y = _TOP + 6 + _ROW_HEIGHT * number
        name = operation if not size[0].isdigit() else f"{operation}, {size}"
        lines.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 17}">{name}</text>')
        for peer, (kind, ratio) in enumerate(zip(("gloo", "mpi"), ratios, strict=True)):
            end, begin = across(float(ratio)), across(1)
            x, width = min(begin, end), max(abs(end - begin), 1.0)
            top = y + 13 * peer
            lines.append(
                f'<rect class="{kind}" x="{x:.0f}" y="{top}" width="{width:.0f}" height="11"/>'
            )
            lines.append(f'<text x="{max(begin, end) + 5:.0f}" y="{top + 10}">{ratio}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(chart((ROOT / "README.md").read_text()))
