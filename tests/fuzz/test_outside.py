"""Programs beyond the written limit."""

from __future__ import annotations

import pytest

from tests.fuzz import outside

COUNT = 40


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_all_ranks_raise_or_have_torchs_values(mesh: tuple[int, ...]) -> None:
    programs = [outside.made(number, mesh) for number in range(3000, 3000 + COUNT)]
    wrong = list(outside.wrong(programs))
    assert not wrong, wrong[0]
