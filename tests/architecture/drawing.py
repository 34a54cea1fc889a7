"""The drawing of the architecture, made from the imports of the sources.

``python -m tests.architecture.drawing`` writes it; a test checks that it is current.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

from tests.architecture.imports import (
    ROOT,
    Graph,
    contracted,
    is_module,
    layer_of,
    module_graph,
    transitive_reduction,
)

DRAWINGS = Path(__file__).parents[2] / "docs" / "concepts"

_BOX, _GAP, _ROW, _HEIGHT = 200, 14, 104, 66
_ARROWHEAD = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><polygon points="0,0 8,4 0,8" fill="#9ca3af"/></marker></defs>'
)
_STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #4b5563; text-anchor: middle }
  .name { font: 600 13px ui-monospace, monospace; fill: #111827 }
  .title { font: 600 15px system-ui, sans-serif; fill: #111827; text-anchor: start }
  rect { fill: #eff6ff; stroke: #60a5fa }
  path { fill: none; stroke: #9ca3af }
  @media (prefers-color-scheme: dark) {
    text { fill: #c3c9d4 } .name, .title { fill: #f3f4f6 }
    rect { fill: #1e3a5f } path { stroke: #8b93a3 }
  }
"""


def drawn_layers() -> str:
    """The SVG of the layers of the package."""
    graph = module_graph()
    layers = {module: layer for module in graph if (layer := layer_of(module))}
    return picture("tilework", layers, graph)


def drawn_dtensor() -> str:
    """The SVG of the parts of dtensor."""
    graph = module_graph()
    return picture("tilework.dtensor", parts_of("dtensor", graph), graph)


#: What draws each file of ``DRAWINGS``.
DRAWN = {"architecture.svg": drawn_layers, "architecture-dtensor.svg": drawn_dtensor}


def parts_of(package: str, graph: Graph) -> dict[str, str]:
    """The folder or file directly within a package that each of its modules belongs to."""
    prefix = f"tilework.{package}."
    return {
        name: name.removeprefix(prefix).split(".")[0] for name in graph if name.startswith(prefix)
    }


def picture(package: str, groups: Mapping[str, str], graph: Graph) -> str:
    """An SVG of the groups of a package's modules: arrows point to what is imported.

    Arrows that follow from others are left out. Each group stands above all that it imports.
    """
    edges = transitive_reduction(contracted(graph, groups))
    rows = _rows(edges)
    width = max(map(len, rows)) * (_BOX + _GAP) + _GAP
    places = {
        name: ((width - len(row) * (_BOX + _GAP) + _GAP) // 2 + at * (_BOX + _GAP), 50 + y * _ROW)
        for y, row in enumerate(reversed(rows))
        for at, name in enumerate(row)
    }
    height = 50 + len(rows) * _ROW
    body = [
        *(
            _arrow(places[name], places[below])
            for name in sorted(edges)
            for below in sorted(edges[name])
        ),
        *(_box(package, name, *places[name]) for row in reversed(rows) for name in row),
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{_STYLE}</style>",
        _ARROWHEAD,
        f'<text class="title" x="16" y="26">{package}: an arrow points to what is imported</text>',
        *body,
        "</svg>",
        "",
    ])  # fmt: skip


def _rows(edges: Graph) -> list[list[str]]:
    """The nodes by the length of the longest path below each, bottom first."""
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = max((measure(below) + 1 for below in edges[name]), default=0)
        return depth[name]

    for name in edges:
        measure(name)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for name in sorted(edges):
        rows[depth[name]].append(name)
    for below, row in pairwise(rows):
        at = {name: i / len(below) for i, name in enumerate(below)}
        row.sort(
            key=lambda name: (
                sum(at.get(b, 0.5) for b in edges[name]) / max(1, len(edges[name])),
                name,
            )
        )
    return rows


def _box(package: str, name: str, x: int, y: int) -> str:
    middle = x + _BOX // 2
    lines = [
        f'<text x="{middle}" y="{y + 33 + 12 * at}">{escape(line)}</text>'
        for at, line in enumerate(_wrapped(_summary(package, name)))
    ]
    return (
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{middle}" y="{y + 18}">{name}</text>' + "".join(lines)
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    x0, y0, x1, y1 = start[0] + _BOX // 2, start[1] + _HEIGHT, end[0] + _BOX // 2, end[1]
    bend = (y1 - y0) // 2
    curve = f"M{x0},{y0} C{x0},{y0 + bend} {x1},{y1 - bend} {x1},{y1}"
    return f'<path marker-end="url(#tip)" d="{curve}"/>'


def _summary(package: str, name: str) -> str:
    """The first sentence of a module's docstring, without its end."""
    if not is_module(f"{package}.{name}") or name == "_core":
        return "the C++ core (csrc/)"
    path = ROOT.parent.joinpath(*package.split("."), name)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = (
        (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    )
    text = re.sub(r":\w+:|[`~]", "", text.split(". ")[0])
    return text.split(": ")[-1].rstrip(".")


def _wrapped(text: str) -> list[str]:
    """A text on at most three lines that fit a box."""
    return textwrap.wrap(text, 32, max_lines=3, placeholder=" …")


def main() -> None:
    """Write the drawings."""
    for name, draw in DRAWN.items():
        (DRAWINGS / name).write_text(draw())


if __name__ == "__main__":
    main()
