"""Charts as SVG: bars, words, a legend, an axis. Light and dark, and without a script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

_STYLE = """
  .tilework { color: #374151 }
  @media (prefers-color-scheme: dark) { .tilework { color: #d1d5db } }
  .tilework text { font: 12px system-ui, sans-serif; fill: currentColor }
  .tilework .title { font-weight: 600; font-size: 14px }
  .tilework .end { text-anchor: end } .tilework .middle { text-anchor: middle }
  .tilework line { stroke: #9ca3af; stroke-opacity: .5 }
"""
#: The place and size of a timeline's rows, in pixels.
_LEFT, _WIDTH, _ROW, _TOP = 150, 640, 22, 64


class Span(NamedTuple):
    """A span of time in a row of a timeline, of a kind, which has a colour.

    ``told`` is the text of a tooltip; ``label`` is left out where it does not fit.
    """

    start: float
    end: float
    kind: str
    told: str
    label: str = ""


def timeline(
    headline: str,
    rows: Sequence[tuple[str, Sequence[Span]]],
    kinds: Mapping[str, tuple[str, str]],
    inherits: bool = False,
    unit: str = " ms",
) -> str:
    """An SVG document of rows of spans of time, below a headline.

    ``kinds`` are the colours and names of the kinds of spans; ``unit`` follows a number;
    ``inherits`` is as for :func:`document`.
    """
    total = max((span.end for _, spans in rows for span in spans), default=0.0) or 1e-6
    scale, height = _WIDTH / total, _TOP + len(rows) * _ROW + 6
    ticks = [
        (_LEFT + ms * scale, f"{ms:g}{unit if ms == 0 else ''}") for ms in round_numbers(total)
    ]
    parts = [
        words(8, 16, headline),
        *legend(_LEFT + 140, 16, {kind: name for kind, (_, name) in kinds.items()}),
        *axis(ticks, _TOP - 8, height),
    ]
    for y, (name, spans) in enumerate(rows):
        parts.append(words(8, _TOP + 12 + y * _ROW, name))
        for span in spans:
            x, width = _LEFT + span.start * scale, max(1.0, (span.end - span.start) * scale)
            parts.append(bar(span.kind, x, _TOP + y * _ROW, width, _ROW - 6, span.told))
            if span.label and 7 * len(span.label) < width:
                label = words(x + width / 2, _TOP + 12 + y * _ROW, span.label, "middle")
                # Dark on every kind's colour, also in a dark page.
                parts.append(label.replace("<text", '<text style="fill:#111827"', 1))
    colours = {kind: fill for kind, (fill, _) in kinds.items()}
    return document(_LEFT + _WIDTH + 40, height, colours, parts, inherits)


def document(
    width: float,
    height: float,
    colours: Mapping[str, str],
    parts: Iterable[str],
    inherits: bool = False,
) -> str:
    """A whole SVG document, as text, with the colours of kinds of bars.

    ``inherits``: words have the colour of the surrounding page, for pages with a theme; else they
    are as the reader's system is set, light or dark.
    """
    kinds = "".join(f"  .tilework .{kind} {{ fill: {fill} }}\n" for kind, fill in colours.items())
    own = ' style="color:inherit"' if inherits else ""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tilework"{own} '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}">',
        f"<style>{_STYLE}{kinds}</style>",
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def bar(kind: str, x: float, y: float, width: float, height: float, told: str = "") -> str:
    """A bar; ``told`` is the text of a tooltip, if any."""
    box = f'<rect class="{kind}" x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"'
    return f"{box}><title>{escape(told)}</title></rect>" if told else f"{box}/>"


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """Words at a place; the kinds "end" and "middle" set the alignment."""
    look = f' class="{kind}"' if kind else ""
    return f'<text{look} x="{x:.6g}" y="{y:.6g}">{escape(text)}</text>'


def legend(x: float, y: float, names: Mapping[str, str]) -> Iterator[str]:
    """The names of kinds beside their colours, in a row."""
    for kind, name in names.items():
        yield bar(kind, x, y - 9, 10, 10)
        yield words(x + 14, y, name)
        x += 34 + 6.5 * len(name)


def axis(ticks: Iterable[tuple[float, str]], top: float, bottom: float) -> Iterator[str]:
    """Lines down the picture, each at a horizontal position with words above."""
    for x, text in ticks:
        yield f'<line x1="{x:.6g}" x2="{x:.6g}" y1="{top:.6g}" y2="{bottom:.6g}"/>'
        yield words(x, top - 6, text, "middle")


def round_numbers(largest: float) -> list[float]:
    """At most eleven round numbers from 0 to ``largest``."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(power * n for n in (0.1, 0.2, 0.5, 1.0) if largest / (power * n) <= 10)
    return [number * step for number in range(int(largest / step) + 1)]
