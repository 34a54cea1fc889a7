"""The contract of process groups as tests: a backend is complete when it passes.

Example (a test module of a backend)::

    from tilework.testing import run_ranks
    from tilework.testing.groups import ProcessGroupContract

    class TestMine(ProcessGroupContract):
        def run(self, n, fn):
            return run_ranks(n, fn, backend="mine")

Needs pytest. A backend with fewer dtypes lists them in ``dtypes``; a backend that is slow to start
shortens ``world_sizes``.
"""

from __future__ import annotations

from tilework.testing.groups.base import GroupSuite
from tilework.testing.groups.disagreement import MismatchSuite, ProvenanceSuite, TimeoutSuite
from tilework.testing.groups.messages import AliasSuite, MessageSuite
from tilework.testing.groups.moves import AllToAllSuite, BroadcastSuite, GatherSuite, ScatterSuite
from tilework.testing.groups.reductions import AllReduceSuite, PrecisionSuite, ReduceSuite
from tilework.testing.groups.subgroups import SubGroupSuite
from tilework.testing.groups.values import DTYPES, Case, assert_same
from tilework.testing.groups.works import MethodSuite, WorkSuite


class ProcessGroupContract(
    BroadcastSuite,
    GatherSuite,
    ScatterSuite,
    AllReduceSuite,
    ReduceSuite,
    PrecisionSuite,
    AllToAllSuite,
    AliasSuite,
    MessageSuite,
    WorkSuite,
    SubGroupSuite,
    MethodSuite,
    MismatchSuite,
    ProvenanceSuite,
    TimeoutSuite,
):
    """Everything a backend must do. Subclass it in a test module and supply ``run``."""


__all__ = ["DTYPES", "Case", "GroupSuite", "ProcessGroupContract", "assert_same"]
