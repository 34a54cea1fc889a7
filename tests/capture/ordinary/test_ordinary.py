"""Each program gives, captured, what it gives as it is; or is refused, where the pages say so."""

from __future__ import annotations

import pytest

from tests.capture.ordinary import PROGRAMS, outcome


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_captured_program_gives_what_it_gives_as_it_is(name: str) -> None:
    found = outcome(name)
    assert found.kind == ("refused" if PROGRAMS[name].refused else "equal"), found.text
