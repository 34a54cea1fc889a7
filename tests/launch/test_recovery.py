"""The launcher's answer to a rank's death, and the report of what happened when."""

from __future__ import annotations

import re

import pytest

from tilework.launch.failure_report import FailureReport, RankFailure
from tilework.launch.recovery import Answer, Recovery
from tilework.launch.settings import LaunchSettings


def killed(rank: int) -> RankFailure:
    return RankFailure(rank=rank, time=0.0, code=-9)


def raised(rank: int, error: str) -> RankFailure:
    report = FailureReport(
        exit_code=1, time=0.0, classes=(f"tilework.errors.{error}",), summary=error, traceback=""
    )
    return RankFailure(rank=rank, time=0.0, code=1, report=report)


def test_restarts_are_used_up_by_all_ranks_together() -> None:
    recovery = Recovery(restarts=2, least=1)
    answers = [recovery.answer(killed(rank), others=3) for rank in (0, 1, 2)]
    assert answers == [Answer.RESTART, Answer.RESTART, Answer.GO_ON]


def test_too_few_ranks_end_the_job() -> None:
    recovery = Recovery(restarts=0, least=3)
    assert recovery.answer(killed(0), others=3) is Answer.GO_ON
    assert recovery.answer(killed(1), others=2) is Answer.END
    assert "2 ranks are left, at least 3 needed" in recovery.report()


def test_nobody_is_started_again_where_nobody_is_left_to_let_it_in() -> None:
    assert Recovery(restarts=5, least=1).answer(killed(0), others=0) is Answer.END


def test_a_death_after_the_others_have_finished_ends_the_job() -> None:
    """What it was about to do nobody does in its place."""
    recovery = Recovery(restarts=5, least=2)
    recovery.note_finished(1)
    assert recovery.answer(killed(0), others=0) is Answer.END
    report = recovery.report()
    assert "the others have finished: nobody is left to do what it was doing" in report
    assert "exit code 0" not in report


def test_a_rank_that_left_in_order_is_told_if_the_others_went_on_without_it() -> None:
    recovery = Recovery(restarts=0, least=1)
    for rank in (0, 1, 2):
        recovery.note_finished(rank)
    shrunk = {"time": recovery._began_wall + 0.5, "kind": "shrunk", "seats": [2]}
    recovery.note_told([shrunk])
    report = recovery.report()
    assert re.findall(r"(\d)  ended \(exit code 0\)", report) == ["0", "1"]
    assert "the group continues with rank 2" in report


def test_a_program_that_does_not_outlive_ranks_ends() -> None:
    recovery = Recovery(restarts=5, least=1)
    assert recovery.answer(raised(1, "PeerLostError"), others=3) is Answer.END


def test_a_rank_that_was_left_out_is_started_again() -> None:
    recovery = Recovery(restarts=5, least=1)
    assert recovery.answer(raised(1, "ExcludedError"), others=3) is Answer.RESTART


def test_the_report_is_in_order_of_time() -> None:
    recovery = Recovery(restarts=1, least=1)
    assert recovery.report() == ""
    recovery.answer(killed(2), others=3)
    recovery.note_told(
        [
            {"time": recovery._began_wall + 0.5, "kind": "shrunk", "seats": [0, 1]},
            {"time": recovery._began_wall + 0.6, "kind": "unknown to this version"},
            {
                "time": recovery._began_wall + 0.7,
                "kind": "resumed",
                "seats": [0, 1],
                "steps": 7,
                "seconds": 0.25,
            },
        ]
    )
    lines = recovery.report().splitlines()
    assert [re.sub(r"^ *[\d.]+ s", "", line).strip() for line in lines] == [
        "ranks came and went:",
        "time  rank  what happened",
        "2  SIGKILL (somebody killed it; often the kernel, for want of memory (see dmesg))",
        "2  started again (1 of 1 restarts)",
        "the group continues with ranks 0, 1",
        "training continues after step 7, 250 ms later",
    ]


def test_the_time_of_a_clock_that_differs_is_not_taken_for_the_job_s() -> None:
    recovery = Recovery(restarts=1, least=1)
    event = {"kind": "shrunk", "seats": [0, 1], "host": "far", "time": 7200.0}
    recovery.note_told([event, {**event, "kind": "grown", "time": recovery._began_wall}])
    lines = recovery.report().splitlines()
    assert "let in" in lines[2]
    assert lines[3].strip().startswith("? s")
    assert "(at 02:00:00 UTC by the clock of far, which differs)" in lines[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"elastic": (1, 2)}, "4 ranks are not between the 1 and 2 of elastic"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LaunchSettings(nprocs=4, **settings)  # type: ignore[arg-type]
