"""What follows from measured times: the arithmetic of benchmarks/collectives.py."""

import dataclasses
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import (
    ADD,
    BEST_MPI,
    COPY,
    GLOO,
    LARGEST,
    MIB,
    OPEN_MPI,
    TILEWORK,
    Case,
    Cell,
    Plan,
    Times,
    cell_of,
    combine,
    compare,
    geometric_mean,
    join,
    limit_seconds,
    scaled,
    size_text,
    spread,
    with_best_mpi,
)

PLAN = Plan((TILEWORK, GLOO, OPEN_MPI), cores=2)


def cells(ratios: Sequence[tuple[int, float | None]]) -> list[Cell]:
    """One for each (bytes, Open MPI's ratio)."""
    return [
        Cell(
            Case("all_reduce", "float32", size),
            2,
            {TILEWORK: 2.0, OPEN_MPI: None if ratio is None else 2.0 * ratio},
        )
        for size, ratio in ratios
    ]


def test_the_slowest_rank_counts() -> None:
    case = Case("all_reduce", "float32", 8)
    times: list[Times] = [{TILEWORK: 1.0, GLOO: None}, {TILEWORK: 3.0, GLOO: None}]
    assert combine(case, 2, times) == Cell(case, 2, {TILEWORK: 3.0, GLOO: None})


def test_there_and_back_counts_half() -> None:
    times: list[Times] = [{TILEWORK: 4.0}, {TILEWORK: 3.0}]
    assert combine(Case("send_recv", "float32", 8), 2, times).seconds == {TILEWORK: 2.0}


def test_share_of_the_limit() -> None:
    case = Case("all_reduce", "float32", LARGEST)
    times: list[Times] = [
        {TILEWORK: 4.0, COPY: 1.0, ADD: 2.0},
        {TILEWORK: 5.0, COPY: 3.0, ADD: 4.0},
    ]
    cell = combine(case, 2, times)
    # Mean rates of both cores: copying takes 2, adding 3, and half of each is to be done.
    assert cell.limit == limit_seconds("all_reduce", copy=2.0, add=3.0) == 2.5
    assert cell.share(TILEWORK) == 0.5
    assert cell.seconds == {TILEWORK: 5.0}


def test_limits_are_of_buffers_of_the_largest_size() -> None:
    limited = [case for case in PLAN.cases(2) if case.has_limit]
    assert [(case.operation, case.bytes) for case in limited] == [
        ("all_reduce", LARGEST),
        ("broadcast", LARGEST),
        ("all_gather", LARGEST // 2),
        ("all_to_all", LARGEST),
    ]


def test_comparison() -> None:
    result = compare(cells([(8, 0.5), (4096, 2.0), (MIB, 8.0), (LARGEST, None)]), OPEN_MPI)
    assert result["cells"] == 3
    assert result["geometric_means"] == {
        "all": 2.0,
        "up to 64 KiB": 1.0,
        "above 64 KiB": 8.0,
        "from 4 KiB": 4.0,
        "2 ranks": 2.0,
    }
    assert result["tilework_slower"] == {"all_reduce 8 B float32 on 2 ranks": 0.5}


def test_joined_runs_keep_their_ratios() -> None:
    case = Case("barrier", "-", 0)
    runs = [
        Cell(case, 2, {TILEWORK: 2.0, GLOO: 8.0, OPEN_MPI: 6.0}),
        Cell(case, 2, {TILEWORK: 4.0, "MPICH": 6.0, "Intel MPI": None}),
    ]
    joined = join(runs)
    assert joined.seconds == {
        TILEWORK: 2.0,
        GLOO: 8.0,
        OPEN_MPI: 6.0,
        "MPICH": 3.0,
        "Intel MPI": None,
    }
    assert with_best_mpi(joined).seconds == {TILEWORK: 2.0, BEST_MPI: 3.0}


@given(st.lists(st.floats(0.01, 100.0), min_size=1))
def test_geometric_mean_of_ratios_turned_round(ratios: list[float]) -> None:
    turned = geometric_mean([1 / ratio for ratio in ratios])
    assert geometric_mean(ratios) * turned == pytest.approx(1.0)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_no_buffer_is_larger_than_the_largest(ranks: int) -> None:
    cases = list(PLAN.cases(ranks))
    assert len(set(cases)) == len(cases)
    gathered = [c.bytes * ranks for c in cases if c.operation in ("all_gather", "reduce_scatter")]
    assert max(gathered) <= LARGEST
    assert any(case.operation == "send_recv" for case in cases) == (ranks == 2)
    assert set(PLAN.segment_cases(ranks)) <= set(cases)


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(json.loads(json.dumps(dataclasses.asdict(PLAN)))) == PLAN


def test_scaled_time_is_constant_when_in_proportion() -> None:
    assert [scaled(1.0 * ranks / 2, ranks, cores=2) for ranks in (2, 4, 16)] == [1.0] * 3


def test_size_text() -> None:
    assert [size_text(n) for n in (0, 8, 4096, LARGEST)] == ["-", "8 B", "4 KiB", "64 MiB"]


def test_the_spread_is_half_the_middle_half_of_the_median() -> None:
    assert spread([10.0, 8.0, 12.0, 9.0, 11.0]) == pytest.approx(0.1)
    assert spread([3.0] * 5) == 0.0
    assert spread([1.0]) == float("inf")


def test_a_cell_has_the_medians_means_and_spreads_of_the_slowest_rank() -> None:
    measured = [
        {TILEWORK: (2.0, 5.0, 0.1), OPEN_MPI: None},
        {TILEWORK: (3.0, 4.0, 0.2), OPEN_MPI: None},
    ]
    cell = cell_of(Case("barrier", "-", 0), 2, measured)
    assert cell.seconds == {TILEWORK: 3.0, OPEN_MPI: None}
    assert cell.spreads == {TILEWORK: 0.2}
    assert cell.by_means().seconds == {TILEWORK: 5.0, OPEN_MPI: None}
