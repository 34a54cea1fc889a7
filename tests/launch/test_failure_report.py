"""Which failure is blamed, how it is told, and how ranks are ended; no processes here."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from tilework.launch import signals
from tilework.launch.failure_report import (
    MAX_SUMMARY_CHARS,
    MAX_TRACEBACK_CHARS,
    PATIENCE_SECONDS,
    SETTLE_SECONDS,
    FailureReport,
    RankFailure,
    decode,
    describe,
    encode,
    root_cause,
    settle_time,
)
from tilework.launch.failure_text import failure_text, other_failures_text

HERE = "tests/launch/test_failure_report.py:37"


def headline(failure: RankFailure) -> str:
    return failure_text(failure).partition("\n")[0]


def report_of(error: BaseException, code: int = 1) -> FailureReport:
    try:
        raise error
    except BaseException as raised:
        return describe(raised, code)


def failure(rank: int, time: float, error: BaseException) -> RankFailure:
    return RankFailure(rank, time, 1, report_of(error))


def test_earliest_cause_is_blamed() -> None:
    failures = [failure(0, 2.0, ValueError()), failure(1, 1.0, KeyError())]
    assert root_cause(failures).rank == 1


def test_the_rank_that_ended_a_group_is_blamed_before_those_that_repeat_it() -> None:
    echo = "the group was aborted by rank 3: Timed out"
    texts = [echo, echo, "Timed out"]
    failures = [
        failure(rank, float(rank), CollectiveTimeoutError(text)) for rank, text in enumerate(texts)
    ]
    assert root_cause(failures).rank == 2


def test_cause_is_blamed_before_earlier_consequences() -> None:
    consequences: list[Exception] = [PeerLostError("gone"), ConnectionResetError(), EOFError()]
    failures = [failure(rank, float(rank), error) for rank, error in enumerate(consequences[:2])]
    assert root_cause([*failures, failure(5, 9.0, ValueError())]).rank == 5


def fail_because_of(lost: PeerLostError, then: BaseException) -> None:
    try:
        raise lost
    except PeerLostError:
        raise then  # noqa: B904


@pytest.mark.parametrize("then", [RuntimeError("training failed"), SystemExit(1)])
def test_what_a_consequence_led_to_is_one(then: BaseException) -> None:
    with pytest.raises(type(then)) as caught:
        fail_because_of(PeerLostError("gone"), then)
    assert failure(0, 0.0, caught.value).is_consequence


def test_torchs_gloo_errors_are_consequences() -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert failure(0, 0.0, RuntimeError(text)).is_consequence


def test_mismatch_is_a_cause() -> None:
    assert not failure(0, 0.0, CollectiveMismatchError("shapes")).is_consequence


def test_death_by_signal_is_older_than_its_discovery() -> None:
    dead = RankFailure(rank=1, time=1.05, code=-signal.SIGKILL)
    assert root_cause([failure(0, 1.0, ValueError()), dead]).rank == 1


def test_a_cause_is_waited_for_only_if_none_is_known() -> None:
    consequence = failure(0, 1.0, PeerLostError("gone"))
    assert settle_time([consequence]) == 1.0 + PATIENCE_SECONDS
    assert settle_time([consequence, failure(1, 1.2, ValueError())]) == 1.0 + SETTLE_SECONDS


def test_everything_ends_within_three_seconds() -> None:
    for steps in (signals.after_failure(), signals.after_signal(signal.SIGINT)):
        assert steps[-1].signal == signal.SIGKILL
        assert PATIENCE_SECONDS + steps[-1].after < 3


# Failure reports


def test_words_survive_the_pipe() -> None:
    report = report_of(ValueError("zwölf\n{"))
    assert decode(encode(report)) == (report, "")


def test_crash_trace_beside_words() -> None:
    report = report_of(ValueError())
    assert decode(b"Fatal Python error\n" + encode(report)) == (report, "Fatal Python error")


@given(st.binary())
def test_any_bytes_are_no_words(data: bytes) -> None:
    assert decode(data)[0] is None


@given(st.integers(min_value=0, max_value=10_000))
def test_words_that_were_cut_off_are_none(cut: int) -> None:
    data = encode(report_of(ValueError("x")))
    assert decode(data[: min(cut, len(data) - 2)])[0] is None


def test_end_of_a_long_traceback_is_kept() -> None:
    report = report_of(ValueError("y" * MAX_TRACEBACK_CHARS))
    assert len(report.traceback) == MAX_TRACEBACK_CHARS
    assert len(report.summary) < 2 * MAX_SUMMARY_CHARS


# Telling


def test_headlines() -> None:
    assert headline(RankFailure(2, 0.0, 3)) == "rank 2 failed: exit code 3"
    assert headline(RankFailure(2, 0.0, -signal.SIGTERM)) == "rank 2 failed: SIGTERM"
    assert headline(RankFailure(2, 0.0, -40)) == "rank 2 failed: signal 40"
    assert headline(failure(2, 0.0, KeyError("k"))) == f"rank 2 failed at {HERE}: KeyError: 'k'"


@given(st.text("ab :;,.", max_size=300).map(str.strip))
def test_a_headline_is_short_and_nothing_is_told_twice(message: str) -> None:
    failed = failure(2, 0.0, ValueError(f"<{message}>\nmore"))
    head, *trace = failure_text(failed).splitlines()
    assert len(head) <= 120
    assert trace[-1] == "  more"
    told = head.removeprefix(f"rank 2 failed at {HERE}: ").removeprefix("ValueError: ")
    rest = trace[-2].partition("ValueError: … ")[2]
    assert f"{told.removesuffix('…')}{rest}".split() == f"<{message}>".split()


def test_a_long_path_is_left_to_the_traceback() -> None:
    report = FailureReport(0.0, (), "ValueError: x", "", 1, f"/{'folder/' * 9}train.py:7")
    assert headline(RankFailure(1, 0.0, 1, report)) == "rank 1 failed at train.py:7: ValueError: x"


def test_exit_status_is_as_a_shell_shows_it() -> None:
    assert RankFailure(0, 0.0, -signal.SIGSEGV).exit_status == 139
    assert RankFailure(0, 0.0, 7).exit_status == 7


def test_others_are_grouped() -> None:
    failures = [failure(rank, 0.0, ValueError("same")) for rank in (3, 1)]
    text = other_failures_text(failure(0, 0.0, KeyError()), [*failures, RankFailure(2, 0.0, 5)])
    assert text == (
        "then failed ranks 1 and 3: ValueError: same\nthen failed rank 2: exit code 5\n"
    )


def test_consequences_and_more_of_the_same_are_told_briefly() -> None:
    others = [failure(1, 0.0, ValueError("1")), failure(2, 0.0, PeerLostError("all about rank 0"))]
    assert other_failures_text(failure(0, 0.0, ValueError("0")), others) == (
        "then failed rank 1: ValueError\nthen failed rank 2: PeerLostError\n"
    )


def test_a_crash_is_not_more_of_the_same() -> None:
    text = other_failures_text(RankFailure(0, 0.0, 3), [RankFailure(1, 0.0, 3)])
    assert text == "then failed rank 1: exit code 3\n"


def test_traceback_is_indented_below_its_headline() -> None:
    first, *rest = failure_text(failure(0, 0.0, ValueError("x"))).splitlines()
    assert first == f"rank 0 failed at {HERE}: ValueError: x"
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest)
