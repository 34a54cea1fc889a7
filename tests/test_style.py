"""Limits of length and habits of prose that can be counted, for which ruff has no rule.

Counts of habits may only fall: a count above its limit fails, and so does a limit that lies
far above the count and has to be lowered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.imports import tree

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 800
#: All of it is a class for hypothesis, whose methods are short.
LONG = {"store_machine"}
#: A docstring begins with the noun of what is returned or done, or with the verb of what is done.
BANNED_FIRST_WORDS = {"What", "How", "Whether", "Which", "Where", "One", "Who", "That"}
#: Pronouns in the source of each package, as (count of "its", count of "one" for a noun).
PRONOUNS = {
    ".": (14, 13),
    "capture": (16, 18),
    "checkpoint": (41, 36),
    "comm": (76, 45),
    "data": (0, 5),
    "distributed": (0, 5),
    "dtensor": (90, 54),
    "inspect": (0, 0),
    "plan": (0, 0),
    "launch": (30, 13),
    "layout": (9, 15),
    "mesh": (5, 14),
    "models": (2, 8),
    "parallel": (15, 44),
    "rendezvous": (0, 10),
    "rpc": (1, 28),
    "sharded": (28, 24),
    "show": (0, 2),
    "store": (6, 38),
    "testing": (16, 7),
    "tiled": (8, 21),
    "torch_backend": (7, 2),
}
#: A count may lie this far below a limit, so that branches that both lower it do not collide.
SLACK = 30
ITS = re.compile(r"\bits\b", re.IGNORECASE)
ONE = re.compile(
    r"\b(the|that|this|which|no|any|each|every|another|new|old|same|only|last|first|next|such)"
    r" one\b|(?<![.\w])ones\b(?!\()|\bone's\b|\bone[.,;:)](?=\s|$)"
    r"|\bone (that|which|who|is|has|may|can|must|was|does|will|with|from|for)\b",
    re.IGNORECASE | re.MULTILINE,
)
#: Words for what a page says of a state that passes.
STALE = re.compile(r"\b(not there|to come|not yet|an earlier version)\b", re.IGNORECASE)
#: Pages that may say so, with the reason.
SAYS_SO = {
    "README.md": "measurements name the version that was measured",
    "benchmarks/README.md": "measurements name the version that was measured",
    "docs/decisions/0007-sharded-modules.md": "keys that a state dict lacks",
    "docs/decisions/0013-data-parallelism.md": "gradients that a backward pass owes",
    "docs/decisions/0020-fully-shard-in-the-graph.md": "gradients that a backward pass owes",
    "docs/errors/README.md": "a host that does not answer",
    "docs/how-to/checkpoints.md": "keys and pages of memory that are missing",
    "docs/how-to/debug-a-hang.md": "a file that was not written",
    "docs/how-to/left-out.md": "the list of what is left out for good",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


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


def prose_pages() -> list[Path]:
    return [
        page
        for page in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md"))
        if not page.relative_to(ROOT).parts[0].startswith(".")
    ]


def prose_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a page without code, tables, and targets of links."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not line.startswith(("|", "```")) and "http" not in line:
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def check_limit(what: str, count: int, limit: int) -> None:
    assert count <= limit, f"{what}: {count}, and at most {limit} are allowed: rewrite some"
    assert count >= limit - SLACK, f"{what}: {count}; lower the limit in {Path(__file__).name}"


def test_every_package_has_a_limit_of_pronouns() -> None:
    folders = (ROOT / "src/tilework").glob("*/__init__.py")
    assert {*PRONOUNS} == {".", *(path.parent.name for path in folders)}


def test_nouns_stand_instead_of_pronouns() -> None:
    for package, limits in PRONOUNS.items():
        folder = ROOT / "src/tilework" / package
        paths = folder.glob("*.py") if package == "." else folder.rglob("*.py")
        text = "\n".join(path.read_text() for path in paths)
        for what, pattern, limit in zip(("its", "one"), (ITS, ONE), limits, strict=True):
            check_limit(f"{what!r} in {package}", len(list(pattern.finditer(text))), limit)


def test_lines_of_prose_are_short() -> None:
    long = [
        f"{place(page, number)}: {len(line)} columns"
        for page in prose_pages()
        for number, line in prose_lines(page)
        if len(line) > 100
    ]
    assert not long, "\n".join(long)


def test_pages_say_what_is_and_not_what_will_be() -> None:
    stale = [
        f"{place(page, number)}: {line}"
        for page in prose_pages()
        if str(page.relative_to(ROOT)) not in SAYS_SO
        for number, line in prose_lines(page)
        if STALE.search(line)
    ]
    assert not stale, "\n".join(stale)
