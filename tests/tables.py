"""Two ways to write many cases as few: a table in one test, and pairs in place of all combinations.

``@each`` is for rows that one behaviour explains: they share a test, which names the rows that
fail. ``@pairs`` is for three factors or more: most faults need two values to meet, so that each
two meet in some case, and no case is there for three of them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each row within one case; arguments are those of ``parametrize``."""
    columns = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    table = [row if len(columns) > 1 else (row,) for row in rows]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            failures = []
            for row in table:
                try:
                    test(*args, **given, **dict(zip(columns, row, strict=True)))
                except Exception as error:
                    failures.append((row, error))
            if failures:
                told = "\n".join(
                    f"{row}: {type(error).__name__}: {error}" for row, error in failures
                )
                raise AssertionError(
                    f"{len(failures)} of {len(table)} rows fail:\n{told}"
                ) from failures[0][1]

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in columns]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def pairs(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that each two values of two factors meet in some case.

    The first two factors by size are combined in full, each further one is laid over their rows
    (Lei and Tai, In-Parameter-Order, 1998). Rows are added for pairs that are left.
    """
    values = {name: list(factor) for name, factor in factors.items()}
    ordered = sorted(values, key=lambda name: -len(values[name]))
    sizes = [len(values[name]) for name in ordered]
    rows = [[*row] for row in itertools.product(range(sizes[0]), range(sizes[1]))]
    for size in sizes[2:]:
        _add_factor(rows, sizes, size)
    cases = [tuple(values[name][row[ordered.index(name)]] for name in values) for row in rows]
    return pytest.mark.parametrize(tuple(values), cases)


def _add_factor(rows: list[list[int]], sizes: Sequence[int], size: int) -> None:
    """Add one number below ``size`` to each row, and rows for the pairs that are still open."""
    known = len(rows[0])
    open_pairs = {
        (column, value, new)
        for column in range(known)
        for value in range(sizes[column])
        for new in range(size)
    }

    def closed(row: Sequence[int], new: int) -> set[tuple[int, int, int]]:
        return {(column, value, new) for column, value in enumerate(row)} & open_pairs

    for number, row in enumerate(rows):
        choices = [(number + shift) % size for shift in range(size)]
        best = max(choices, key=lambda new: len(closed(row, new)))
        open_pairs -= closed(row, best)
        row.append(best)
    while open_pairs:
        column, value, new = min(open_pairs)
        fitting = (row for row in rows if row[column] == value)
        row = max((row[:known] for row in fitting), key=lambda row: len(closed(row, new)))
        open_pairs -= closed(row, new)
        rows.append([*row, new])
