"""Docstrings drawn at random, for a reader who marks those that had to be read twice.

``python -m tests.drawn_docstrings 7`` prints 60 docstrings for the seed 7.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator

from tests.architecture.imports import FILES, ROOT

DRAWN = 60


def docstrings() -> Iterator[tuple[str, str]]:
    """The place and the text of each docstring of the sources, without the examples."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").partition("Example")[0].strip()
                name = "" if isinstance(node, ast.Module) else f": {node.name}"
                if text:
                    yield f"{path.relative_to(ROOT)}{name}", text


def drawn(seed: int, count: int = DRAWN) -> list[tuple[str, str]]:
    """Docstrings for a seed."""
    return random.Random(seed).sample(list(docstrings()), count)


if __name__ == "__main__":
    for place, text in drawn(int(sys.argv[1])):
        print(f"## {place}\n{text}\n")
