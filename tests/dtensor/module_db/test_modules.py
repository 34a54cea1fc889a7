"""All modules of torch's database, forward and backward."""

from __future__ import annotations

import pytest

from tests.dtensor.module_db.modules import cases, infos, problems

PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_modules_of_torchs_database_give_what_plain_ones_give(part: int) -> None:
    found = [
        case
        for number, info in enumerate(infos()[part::PARTS])
        for case in cases(info, training=number % 3 != 0, most=2)
    ]
    assert len(found) > 10
    assert not problems(found)
