"""Charts of tables in README.md and a page: ``python docs/site/chart.py`` draws them again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from tilework.show import svg

ROOT = Path(__file__).parents[2]
README, STEPS = ROOT / "README.md", ROOT / "docs/how-to/make-a-step-fast.md"
CHART, RESULTS = ROOT / "docs/collectives.svg", ROOT / "docs/results.svg"
#: As the table has them: operation, size, tilework's time, then each peer's "time (ratio)".
_ROW = re.compile(
    r"^\| (\w+) \| ([^|]+?) \| ([\d.,]+) \| [\d.,]+ \(([\d.]+)\) \| [\d.,]+ \(([\d.]+)\) \|", re.M
)
#: The same rows, with the peers' times in place of the ratios.
_TIMES = re.compile(
    r"^\| (\w+) \| ([^|]+?) \| ([\d.,]+) \| ([\d.,]+) \([\d.]+\) \| ([\d.,]+) \([\d.]+\) \|", re.M
)
#: Times of a step: the columns of the row with AdamW that comes first.
_STEP = re.compile(r"^\| the same with AdamW \| (\d+) \| \d+ \| (\d+) \| (\d+) \| (\d+) \|", re.M)
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


def results(table: str, steps: str) -> str:
    """An SVG of a step's times and of an all_reduce's, two groups of bars, each to scale."""
    _, _, ours, gloo, mpi = next(row for row in _TIMES.findall(table) if row[1] == "1 MiB")
    by_hand, dtensors, captured, inductor = _STEP.findall(steps)[0]
    step = {
        "DTensors": dtensors,
        "collectives by hand": by_hand,
        "captured": captured,
        "captured, Inductor": inductor,
    }
    reduce = {"Gloo": gloo, "Open MPI": mpi, "tilework": ours}
    parts = [
        *_bars(0, 145, "A training step on 2 ranks, µs", step, ("captured", "captured, Inductor")),
        *_bars(400, 75, "all_reduce of 1 MiB on 2 ranks, µs", reduce, ("tilework",)),
    ]
    return svg.document(770, 150, {"ours": "#14b8a6", "other": "#9ca3af"}, parts)


def _bars(
    x: int, left: int, title: str, times: dict[str, str], ours: tuple[str, ...]
) -> Iterator[str]:
    yield svg.words(x + 10, 20, title, "title")
    scale = (310 - left) / max(map(float, times.values()))
    for number, (name, time) in enumerate(times.items()):
        y, width = 36 + 28 * number, max(round(scale * float(time)), 2)
        yield svg.words(x + left - 8, y + 14, name, "end")
        yield svg.bar("ours" if name in ours else "other", x + left, y, width, 20)
        yield svg.words(x + left + width + 6, y + 14, time)


if __name__ == "__main__":
    CHART.write_text(chart(README.read_text()))
    RESULTS.write_text(results(README.read_text(), STEPS.read_text()))
