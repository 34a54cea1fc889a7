"""Limits of length, and docstrings' first words, for which ruff has no rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 800
#: All of it is a class for hypothesis, whose methods are short.
LONG = {"store_machine"}
#: A docstring begins with the noun of what is returned or done, or with the verb of what is done.
BANNED_FIRST_WORDS = {"What", "How", "Whether", "Which", "Where", "One", "Who", "That"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Lines of a function without its decorators and its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_functions_are_short() -> None:
    long = [
        f"{place(path, function.lineno)} {function.name}: {body_lines(function)} lines"
        for path in SOURCES
        for function in functions(path)
        if body_lines(function) > MAX_FUNCTION_LINES and function.name not in LONG
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("folder", ["src", "csrc", "tests"])
def test_files_are_short(folder: str) -> None:
    paths = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".pyi", ".cpp", ".h")]
    counts = {path: path.read_text().count("\n") for path in paths}
    assert not [f"{place(p, 1)} {n} lines" for p, n in counts.items() if n > MAX_FILE_LINES]


def first_words(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.split(maxsplit=1)[0].rstrip(",.:;")


def test_docstrings_begin_with_what_is_returned_or_done() -> None:
    riddles = [
        f"{place(path, line)} begins with {word!r}"
        for path in SOURCES
        for line, word in first_words(path)
        if word in BANNED_FIRST_WORDS
    ]
    assert not riddles, "\n".join(riddles)
