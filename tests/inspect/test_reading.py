"""Files that are cut, damaged, full, of another job, or hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.inspect.jobs import MS, operation, write_rank
from tilework.inspect import TraceError, read_timeline, summarize
from tilework.inspect.reading import read_file, read_folder
from tilework.inspect.timeline import timeline_of


def test_a_cut_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, [operation(1, 0, 1), operation(2, 2, 3)])
    path.write_bytes(path.read_bytes()[:-9])
    trace = read_file(path)
    assert [op.number for op in trace.operations] == [1]
    assert "cut or damaged in line 8" in trace.problems[0]


def test_a_later_line_replaces_an_earlier(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, [operation(1, 1, 0), operation(1, 1, 3), ["z", 4 * MS]])
    trace = read_file(path)
    assert [(op.entered, op.ended) for op in trace.operations] == [(MS, 3 * MS)]
    assert trace.problems == []


def test_a_span_without_an_end_ends_with_the_trace(tmp_path: Path) -> None:
    lines = [["t", 9, "forward"], ["b", 1, MS, 9], ["b", 1, 2 * MS, 9], ["e", 1, 3 * MS]]
    trace = read_file(write_rank(tmp_path, 0, lines))
    assert [(s.start, s.end, s.closed) for s in trace.spans] == [
        (MS, 3 * MS, False),
        (2 * MS, 3 * MS, True),
    ]
    assert "was killed" in trace.problems[0]


def test_control_characters_are_replaced(tmp_path: Path) -> None:
    lines = [["t", 9, "\x1b[31mred\n"], ["b", 1, 0, 9], ["e", 1, 1], ["h", 1, "\x07"], ["z", 2]]
    trace = read_file(write_rank(tmp_path, 0, lines))
    assert trace.spans[0].name == "?[31mred "
    assert trace.threads == {1: "?"}


@pytest.mark.parametrize(
    "line",
    [
        ["o", 1, 1],
        ["o", 2, *operation(1, 0, 1)[2:]],
        ["b", 1, float("nan"), 0],
        ["b", 1, 10**30, 0],
        ["?"],
        [],
        {"t": 1},
    ],
)
def test_a_line_of_another_form_is_damage(tmp_path: Path, line: list[object]) -> None:
    trace = read_file(write_rank(tmp_path, 0, [operation(1, 0, 1), line]))
    assert len(trace.operations) == 1
    assert "damaged in line 8" in trace.problems[0]


def test_files_of_several_jobs_are_refused(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [["z", 1]])
    write_rank(tmp_path, 1, [["z", 1]], job="k")
    with pytest.raises(TraceError, match=r"2 jobs \(rank 0 of job j; rank 1 of job k\): keep"):
        read_folder(tmp_path)


def test_a_file_of_an_earlier_trace_is_left_out(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [["z", 10 * MS]], wall=90 * MS)
    write_rank(tmp_path, 3, [["z", 10 * MS]])
    assert [trace.rank for trace in read_folder(tmp_path)] == [0]
    assert "of an earlier trace: rank 3" in read_folder(tmp_path)[0].problems[0]


def test_what_is_no_trace_is_left_out_and_named(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [["z", 1]])
    (tmp_path / "rank-1.jsonl").write_text("hello\n")
    write_rank(tmp_path, 2, [["z", 1]], tilework_trace=99)
    (told, other) = read_folder(tmp_path)[0].problems
    assert "rank-1.jsonl is left out: it does not begin with the header" in told
    assert "it is of version 99, but this tilework reads version 1" in other


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"there is no trace in .*name the folder given to trace"):
        read_timeline(tmp_path)
    with pytest.raises(TraceError, match=r"cannot read the folder .*No such file"):
        read_timeline(tmp_path / "missing")


def test_only_so_much_of_a_moment_is_read(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [operation(number, 1, 1) for number in range(1, 1000)])
    (trace,) = read_folder(tmp_path, most_bytes=10_000)
    assert 10 < len(trace.operations) < 999
    assert "of rank 0 only the first 0.0 of 0.1 MB are read" in trace.problems[0]


def test_of_a_trace_that_is_too_large_stretches_of_all_ranks_are_read(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [operation(n, 10 * n + 4 * rank, 10 * n + 5) for n in range(1, 4000)]
        write_rank(tmp_path, rank, [*lines, ["z", 40_000 * MS]])
    timeline = timeline_of(read_folder(tmp_path, most_bytes=50_000))
    assert sum(not meeting.complete for meeting in timeline.meetings) <= 2 * 16  # at the ends
    assert 100 < len(timeline.meetings) < 1000
    assert timeline.meetings[-1].number > 3500
    (late,) = summarize(timeline).late
    assert (late.rank, round(late.share, 1)) == (1, 0.4)
    assert "more than 0 MB: 16 stretches are read" in timeline.problems[0]


def test_spans_of_a_sample_end_where_they_ended(tmp_path: Path) -> None:
    lines: list[list[object]] = [["t", 9, "outer"]]
    for n in range(1, 2000):
        lines += [["b", 1, n * MS, 9], operation(n, n, n), ["b", 1, n * MS + 1, 9]]
        lines += [["e", 1, n * MS + 2], ["e", 1, n * MS + 3]]
    write_rank(tmp_path, 0, [*lines, ["z", 2001 * MS]])
    (trace,) = read_folder(tmp_path, most_bytes=20_000)
    assert {span.end - span.start for span in trace.spans} == {1, 3}


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.jsonl")
    with pytest.raises(TraceError, match="it is not a regular file"):
        read_folder(tmp_path)
