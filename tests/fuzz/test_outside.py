"""Programs beyond the written limit."""

from __future__ import annotations

from tests.fuzz import outside
from tests.tables import each

COUNT = 24


@each("mesh", [(2,), (3,), (2, 2)])
def test_all_ranks_raise_or_have_torchs_values(mesh: tuple[int, ...]) -> None:
    programs = [outside.made(number, mesh) for number in range(3000, 3000 + COUNT)]
    wrong = list(outside.wrong(programs))
    assert not wrong, wrong[0]
