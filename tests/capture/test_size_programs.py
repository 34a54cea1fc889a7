"""Random programs that look at sizes: TILEWORK_SIZE_PROGRAMS=2000 tries more of them."""

from __future__ import annotations

import os
import warnings

from hypothesis import Phase, given, settings

from tests.capture.size_programs import SizeProgram, judged, size_programs
from tests.hypothesis_settings import examples

COUNT = int(os.environ.get("TILEWORK_SIZE_PROGRAMS", "25"))


@settings(examples(COUNT), phases=[Phase.generate])  # to make an example smaller takes minutes
@given(size_programs())
def test_a_captured_program_gives_what_it_gives_as_it_is_at_every_size(
    program: SizeProgram,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, text = judged(program)
    assert kind in ("equal", "refused", "invalid"), f"{kind}, {text}\n{program.source}"
