"""Random programs and algebraic laws, over random shapes, dtypes, layouts and ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilework.distributed as dist
from tests.hypothesis_settings import examples
from tests.random_programs import RandomProgram, cases, programs, run_program, subsets
from tilework.testing import run_ranks
from tilework.testing.groups.values import FLOATS, Case, assert_same, bits, folded

LIMIT = timedelta(seconds=120)


def run(
    backend: str, program: RandomProgram, kind: Literal["threads", "processes"] = "threads"
) -> None:
    run_ranks(
        program.n,
        lambda rank: run_program(program, rank),
        kind=kind,
        backend=backend,
        timeout=LIMIT,
    )


@given(programs(max_ranks=5))
@examples(30)
def test_random_programs_on_threads(program: RandomProgram) -> None:
    run("threads", program)


@given(programs(max_ranks=5))
@examples(40)
def test_random_programs_on_shm(program: RandomProgram) -> None:
    run("shm", program)


@given(programs(max_ranks=3))
@examples(10)
def test_random_programs_between_processes(program: RandomProgram) -> None:
    run("shm", program, kind="processes")


@pytest.mark.parametrize("backend", ["threads", "shm"])
@given(dtype=st.sampled_from(FLOATS), data=st.data())
@examples(25)
def test_sums_of_any_floats_are_rank_ordered_folds(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    n = data.draw(st.integers(2, 4))
    floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
    rows = data.draw(st.lists(st.lists(floats, min_size=n, max_size=n), min_size=1, max_size=9))
    values = torch.tensor(rows, dtype=torch.float64).to(dtype).T.contiguous()

    def body(rank: int) -> None:
        tensor = values[rank].clone()
        dist.all_reduce(tensor)
        expected = folded("SUM", list(values))
        number = ~expected.isnan()
        assert torch.equal(tensor.isnan(), ~number)
        assert torch.equal(bits(tensor[number]), bits(expected[number]))

    run_ranks(n, body, backend=backend, timeout=LIMIT)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@given(case=cases(), n=st.integers(1, 4))
@examples(25)
def test_scatter_undoes_gather(backend: str, case: Case, n: int) -> None:
    def body(rank: int) -> None:
        parts = [case.blank() for _ in range(n)] if rank == 0 else None
        dist.gather(case.make(rank), parts, dst=0)
        again = case.blank()
        dist.scatter(again, parts, src=0)
        assert_same(again, case.value(rank), case)

    run_ranks(n, body, backend=backend, timeout=LIMIT)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@given(data=st.data(), n=st.integers(1, 4))
@examples(25)
def test_an_exchange_and_its_reverse_give_back_everything(
    backend: str, data: st.DataObject, n: int
) -> None:
    row = st.lists(st.integers(0, 6), min_size=n, max_size=n)
    splits = data.draw(st.lists(row, min_size=n, max_size=n))

    def body(rank: int) -> None:
        sent, received = splits[rank], [row[rank] for row in splits]
        mine = torch.arange(sum(sent)) + 100 * rank
        theirs, again = torch.zeros(sum(received), dtype=torch.int64), torch.zeros_like(mine)
        dist.all_to_all_single(theirs, mine, received, sent)
        dist.all_to_all_single(again, theirs, sent, received)
        assert_same(again, mine)

    run_ranks(n, body, backend=backend, timeout=LIMIT)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@given(members=subsets(4))
@examples(15)
def test_any_ranks_make_a_group(backend: str, members: list[int]) -> None:
    def body(rank: int) -> None:
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)

    run_ranks(4, body, backend=backend, timeout=LIMIT)
