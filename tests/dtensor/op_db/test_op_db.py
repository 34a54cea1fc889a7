"""A part of torch's own database of operators; all of it: ``python -m tests.dtensor.op_db``."""

from __future__ import annotations

import zlib

import pytest
import torch

from tests.dtensor.op_db import table
from tests.dtensor.op_db.calls import Case, cases, dtypes_of, forms, named, operators
from tests.dtensor.op_db.running import run_cases

PARTS = 16


def some_of(part: int) -> list[Case]:
    """Calls of one part of the operators: which form and which samples depends on the name."""
    found: list[Case] = []
    for info in operators()[part::PARTS]:
        seed = zlib.crc32(named(info).encode())
        dtype = next(iter(dtypes_of(info, [torch.float64])), torch.float64)
        names = ["function", *[form.name for form in forms(info)]]
        only = [names[seed % len(names)]]
        found += cases(info, dtype, 2, meshes=[(2,)], seed=seed, only=only)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_of_torchs_database_give_what_plain_tensors_give(part: int) -> None:
    results = run_cases(some_of(part))
    wrong = [str(result) for result in results if result.outcome not in ("right", "refused")]
    assert not wrong, "\n".join(wrong)
    told = table.read()
    untrue = [
        f"{result.case.operator}: gathers {sorted(set(result.gathered))}"
        for result in results
        if result.gathered and told.get(result.case.operator) == table.NEVER
    ]
    assert not untrue, f"docs/operators.md is not true (see CONTRIBUTING.md): {untrue}"


def test_the_table_of_operators_has_each_of_them() -> None:
    assert sorted(table.read()) == [named(info) for info in operators()]


def test_the_table_of_operators_is_as_its_program_writes_it() -> None:
    assert table.DOCUMENT.read_text() == table.written_again()
