"""``docs/operators.md``: which operators run on cut tensors as they are, and which gather them.

``python -m tests.dtensor.database.table`` writes it anew.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

from tests.dtensor.database.calls import Case, cases, dtypes_of, forms, named, operators
from tests.dtensor.database.running import Result, run_cases

DOCUMENT = Path(__file__).parents[3] / "docs" / "operators.md"
NATIVE, PARTLY, GATHERED = "never gathered", "some calls are gathered", "gathered"

_HEAD = """\
# Operators

DTensor takes all operators. Most run on each rank's part of the tensors, or are composed of
operators that do. For the others the tensors are gathered: the result is right, but every rank
gets all of the bytes, and a `GatherWarning` tells so once. Which is which was found by calling
each operator of the database that torch has for its own tests ({count} operators) with its sample
arguments, cut along their first dim, their last, and at random; all gave what plain tensors give.

{never} operators were never gathered (a dim that an operator needs whole is, but not the others),
{partly} for some calls, {gathered} always.

This file is written by `python -m tests.dtensor.database.table`.

| operator | calls | |
|---|---|---|
"""


def read(document: Path = DOCUMENT) -> dict[str, str]:
    """What the document says of each operator."""
    rows = [line.split("|") for line in document.read_text().splitlines() if line.startswith("| `")]
    return {row[1].strip().strip("`"): row[3].strip() for row in rows}


def samples_of(info: object) -> list[Case]:
    """The calls that the table is made from."""
    (dtype, *_) = dtypes_of(info, [torch.float64])
    only = [form.name for form in forms(info) if form.name != "out="]
    return list(cases(info, dtype, 4, meshes=[(2,)], only=only))


def row(name: str, results: list[Result]) -> tuple[str, int, str]:
    """An operator's row."""
    gathered = sum(bool(result.gathered) for result in results)
    told = NATIVE if not gathered else GATHERED if gathered == len(results) else PARTLY
    return name, len(results), told if results else "no sample that torch can run here"


def main() -> int:
    """Write the document; print what is not right."""
    rows, bad = [], 0
    for info in operators():
        chosen = samples_of(info)
        results = run_cases(chosen) if chosen else []
        for result in results:
            if result.outcome != "right":
                bad += 1
                print(result)
        rows.append(row(named(info), results))
    counts = Counter(told for _, _, told in rows)
    head = _HEAD.format(
        count=len(rows), never=counts[NATIVE], partly=counts[PARTLY], gathered=counts[GATHERED]
    )
    DOCUMENT.write_text(
        head + "".join(f"| `{n}` | {count} | {told} |\n" for n, count, told in rows)
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
