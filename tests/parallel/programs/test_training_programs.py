"""Training programs of many kinds, in each way that fits, have the losses of one process."""

from __future__ import annotations

import pytest

from tests.parallel.programs.kinds import PROGRAMS
from tests.parallel.programs.training import check, fits, plain
from tests.parallel.programs.ways import WAYS
from tilework.testing import run_ranks


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) for kind in PROGRAMS for way in WAYS if fits(kind, way)]
)
def test_losses_and_parameters_are_those_of_one_process(kind: str, way: str) -> None:
    plain(kind)  # before there are ranks
    run_ranks(WAYS[way].ranks, lambda rank: check(kind, way))
