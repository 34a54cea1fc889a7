"""Plans run between any two tilings, against the plain result."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.comm.transfer_model import Case, cases, same
from tilework.comm.transfer import run_plan
from tilework.layout import plan
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=15)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def transfer(case: Case, rank: int, out: list[Tensor] | None) -> list[Tensor]:
    return run_plan(
        plan(case.source, case.target, rank),
        case.tiles(rank),
        out=out,
        dtype=case.dtype,
        buffer_bytes=case.buffer_bytes,
    )


def check(case: Case, rank: int, given_out: bool) -> None:
    out = case.room(rank) if given_out else None
    results = transfer(case, rank, out)
    expected = case.expected(rank)
    assert len(results) == len(expected)
    assert all(same(a, b) for a, b in zip(results, expected, strict=True)), (case, rank)
    if out is None:
        assert all(result.is_contiguous() for result in results)
    else:
        assert all(a is b for a, b in zip(results, out, strict=True))


@given(cases())
@examples(150)
def test_any_transfer_equals_the_plain_result(case: Case) -> None:
    run_ranks(case.n, lambda rank: check(case, rank, given_out=case.strided), timeout=LIMIT)
