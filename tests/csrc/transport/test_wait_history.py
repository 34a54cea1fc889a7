"""How long a rank stays awake, yields or moves: by a made-up clock."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from tilework._core import WaitHistory, worked_within

MICROSECOND, MILLISECOND, SECOND = 1_000, 1_000_000, 1_000_000_000
#: Longer than a time slice of 4 ms, which an awaited peer may have lost.
PATIENT = 10 * MILLISECOND


def awake_ns(history: WaitHistory, threads: int = 2, cores: int = 2) -> int:
    """Until when the next wait stays awake."""
    return history.pace(threads, cores)[2]


def test_where_waits_are_short_a_time_slice_is_waited_for_awake() -> None:
    history = WaitHistory()
    for number in range(5_000):
        lost = number % 100 == 0  # a peer that was pre-empted
        history.record(4 * MILLISECOND if lost else 2 * MICROSECOND, 2, 2)
        assert awake_ns(history) == PATIENT


@given(st.lists(st.integers(60 * MICROSECOND, SECOND), min_size=1, max_size=300))
def test_long_waits_sleep_soon_and_the_time_awake_is_bounded(waits: list[int]) -> None:
    history = WaitHistory()
    awake = 0
    for waited in waits:
        awake += min(waited, awake_ns(history))
        history.record(waited, 2, 2)
    assert awake <= 5 * PATIENT + len(waits) * 50 * MICROSECOND


def test_short_waits_make_a_rank_patient_again() -> None:
    history = WaitHistory()
    for _ in range(1_000):
        history.record(SECOND, 2, 2)
    assert awake_ns(history) == 50 * MICROSECOND
    for _ in range(300):
        history.record(MICROSECOND, 2, 2)
    assert awake_ns(history) == PATIENT


@each(("ranks", "cores", "crowded"), [(2, 2, False), (4, 2, True), (64, 2, True)])
def test_ranks_without_a_core_each_yield_from_the_start(
    ranks: int, cores: int, crowded: bool
) -> None:
    spin, short, _, is_crowded = WaitHistory().pace(ranks, cores)
    assert is_crowded == crowded
    assert (spin < MICROSECOND) == crowded
    assert short >= 20 * MICROSECOND * ranks // cores


def test_a_yield_that_lost_the_core_is_tried_again_later_and_later() -> None:
    history, now, tried = WaitHistory(), 0, []
    while now < 4 * SECOND:
        if not history.avoids_yields(now):
            tried.append(now)
            now += 4 * MILLISECOND  # a program that computes had the core
            history.record_yield(now, 4 * MILLISECOND)
        now += MILLISECOND
    lost = 4 * MILLISECOND * len(tried)
    assert len(tried) > 5
    assert lost < 4 * SECOND // 50
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)


def test_yields_that_answer_are_kept() -> None:
    history = WaitHistory()
    for now in range(0, SECOND, MILLISECOND):
        history.record_yield(now, MICROSECOND)
        history.record_yields(now, False)
        assert not history.avoids_yields(now + 1)


def test_yields_that_switch_to_nobody_are_given_up_after_some() -> None:
    history = WaitHistory()
    for now in range(3):
        history.record_yields(now, True)
        assert not history.avoids_yields(now + 1)
    history.record_yields(4, True)
    assert history.avoids_yields(5)
    assert not history.avoids_yields(SECOND)


def test_a_rank_that_shares_a_core_moves_and_the_less_often_the_less_it_helps() -> None:
    history = WaitHistory()
    moves = [now for now in range(0, SECOND, 10 * MICROSECOND) if history.should_move(now)]
    assert 1 * MILLISECOND <= moves[0] <= 2 * MILLISECOND
    assert len(moves) <= 10
    gaps = [after - before for before, after in itertools.pairwise(moves)]
    assert gaps == sorted(gaps)


def test_a_rank_that_shares_a_core_now_and_then_stays() -> None:
    history = WaitHistory()
    assert not any(history.should_move(now) for now in range(0, SECOND, 6 * MILLISECOND))


def test_yields_are_kept_where_another_program_runs_only_now_and_then() -> None:
    history = WaitHistory()
    for now in range(0, SECOND, 20 * MILLISECOND):
        history.record_yield(now, 2 * MILLISECOND)
        assert not history.avoids_yields(now + 1)


def test_of_many_waits_that_share_a_core_few_look_at_the_spread_of_ranks() -> None:
    history = WaitHistory()
    looks = sum(history.should_look() for _ in range(1_000))
    assert 10 <= looks <= 100


@each(
    ("works_since", "waits_since", "worked"),
    [
        (0, 0, 0),  # it never waited, nor worked
        (20, 10, 80),  # it still works, since the yield
        (-50, -60, 100),  # and since before
        (20, 70, 50),  # it worked and waits
        (-50, 30, 30),
        (20, 500, 80),
        (-50, -20, 0),  # it waits since before the yield: another program had the core
        (200, 100, 0),  # it went on after the yield
        (-(2**63), 2**63 - 1, 100),  # garbage is no more than the whole
    ],
)
def test_the_time_of_a_yield_in_which_a_peer_had_work_to_do(
    works_since: int, waits_since: int, worked: int
) -> None:
    assert worked_within(0, 100, works_since, waits_since) == worked
