"""Plans run between any two tilings, against the plain result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from torch import Tensor

import tilework.distributed as dist
from tests.comm.transfer.reference import Case, cases, same
from tests.hypothesis_settings import examples
from tilework.comm.operations import collectives
from tilework.comm.transfer import run_plan
from tilework.layout import plan
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)


def transfer(case: Case, rank: int, out: list[Tensor] | None) -> list[Tensor]:
    tiles = case.tiles(rank)
    results = run_plan(
        plan(case.source, case.target, rank),
        tiles,
        out=out,
        dtype=case.dtype,
        buffer_bytes=case.buffer_bytes,
    )
    assert all(same(a, b) for a, b in zip(tiles, case.tiles(rank), strict=True))
    return results


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
@examples(90)
def test_any_transfer_equals_the_plain_result(case: Case) -> None:
    run_ranks(case.n, lambda rank: check(case, rank, given_out=case.strided), timeout=LIMIT)


def counting(call: Callable[..., Any], received: Counter[int], pick: Callable[..., Any]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        received[dist.get_rank()] += pick(*args, **kwargs)
        return result

    return counted


def of_others(outputs: Sequence[Tensor] | None, *args: Any, **kwargs: Any) -> int:
    me = dist.get_rank()
    return sum(t.nbytes for peer, t in enumerate(outputs or ()) if peer != me)


def from_root(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    root = kwargs["group_src"]
    return 0 if dist.get_rank() == root else tensor.nbytes


#: How many bytes a call brings from other ranks.
RECEIVED: dict[str, Callable[..., int]] = {
    "all_to_all": of_others,
    "all_gather": of_others,
    "gather": lambda tensor, outputs, **kwargs: of_others(outputs),
    "scatter": from_root,
    "broadcast": from_root,
}


@given(cases())
@examples(60)
def test_a_rank_receives_what_its_plan_says_and_no_more(case: Case) -> None:
    received: Counter[int] = Counter()

    def program(rank: int) -> None:
        steps = plan(case.source, case.target, rank)
        transfer(case, rank, None)
        if steps.collective.kind not in ("all_reduce", "reduce_scatter"):
            assert received[rank] == steps.bytes_received(case.dtype.itemsize), steps

    with pytest.MonkeyPatch.context() as patch:
        for name, pick in RECEIVED.items():
            call = getattr(collectives, name)
            patch.setattr(collectives, name, counting(call, received, pick))
        run_ranks(case.n, program, timeout=LIMIT)
