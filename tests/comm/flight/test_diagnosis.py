"""What records made by hand tell: situations that are hard to bring about, and any nonsense."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.comm.flight.diagnosis import Finding, diagnose
from tilework.comm.flight.document import (
    MAX_ENTRIES,
    FlightRecordError,
    GroupLog,
    Record,
    RecordedFault,
    Stack,
    decode,
    encode,
    latest,
)
from tilework.comm.flight.history import named
from tilework.comm.flight.ring import Entry

SITE = "train.py:7 in step"


def entry(number: int, what: str = "barrier", outcome: str = "done", **fields: object) -> Entry:
    ended = None if outcome == "running" else 2.0
    made = Entry(number, what, SITE, 1.0, ended, outcome)
    return replace(made, **fields)  # type: ignore[arg-type]


def group(
    *entries: Entry, ranks: Sequence[int] = (0, 1), name: str = "default", backend: str = "gloo"
) -> GroupLog:
    return GroupLog(name, backend, "", tuple(ranks), entries)


def record(rank: int, *groups: GroupLog, inside: bool = True, **fields: object) -> Record:
    stacks = (Stack("MainThread", (f"tilework/native.py:1 in run\n{SITE}",), SITE, inside),)
    made = Record(rank, 2, "here", 7, "", 3.0, (), stacks, groups)
    return replace(made, **fields)  # type: ignore[arg-type]


def findings(*records: Record) -> list[Finding]:
    return diagnose({record.rank: record for record in records})


def test_operations_that_nobody_compared() -> None:
    """Backends of torch wait, or worse, where ranks call different things."""
    zero = group(entry(1), entry(2, "all_reduce float32 [3] SUM", "running"))
    one = group(entry(1), entry(2, "broadcast float32 [3] root 0", "running"))
    (found,) = findings(record(0, zero), record(1, one))
    assert (found.kind, found.number) == ("mismatch", 2)
    assert found.details[0] == f"rank 0: all_reduce float32 [3] SUM at {SITE}"


def test_where_they_began_to_differ() -> None:
    zero = group(entry(1, "broadcast float32 [1] root 0"), entry(2), entry(3, outcome="running"))
    one = group(entry(1, "all_gather float32 [1]"), entry(2, outcome="running"))
    assert findings(record(0, zero), record(1, one))[0].number == 1


def test_forms_of_one_operation_do_not_differ() -> None:
    zero = group(entry(1, "all_gather_into_tensor float32 in [3], out [6]"))
    one = group(entry(1, "all_gather float32 in [3], out 2 x [3]"))
    assert [found.kind for found in findings(record(0, zero), record(1, one))] == ["fine"]


def test_all_have_come_and_data_moves() -> None:
    zero, one = group(entry(1, outcome="running")), group(entry(1))
    (found,) = findings(record(0, zero), record(1, one))
    assert found.kind == "busy"
    assert found.details[-1].endswith("or a rank stopped; rank 1 is done with it")


def test_who_computes_while_its_own_work_waits_is_in_no_circle() -> None:
    a, b = {"name": "a"}, {"name": "b"}
    zero = [group(entry(1, outcome="running"), **a), group(**b)]  # type: ignore[arg-type]
    one = [group(**a), group(entry(1, outcome="running"), **b)]  # type: ignore[arg-type]
    busy = record(0, *zero, inside=False)
    assert [f.kind for f in findings(busy, record(1, *one))] == ["waiting", "waiting"]
    assert [f.kind for f in findings(record(0, *zero), record(1, *one))] == ["deadlock"]


def test_a_receive_from_anyone_is_no_circle() -> None:
    recv = entry(0, "recv float32 [1] from any rank tag 0", "running", peer=-1)
    from_zero = entry(0, "recv float32 [1] from rank 0 tag 0", "running", peer=0)
    ranks = (0, 1, 2)
    zero, one = group(recv, ranks=ranks), group(from_zero, ranks=ranks)
    found = findings(record(0, zero), record(1, one), record(2, group(ranks=ranks), inside=False))
    assert {finding.kind for finding in found} == {"message"}


def test_two_ends_that_are_both_there() -> None:
    send = entry(0, "send float32 [9] to rank 1 tag 3", "running", peer=1, tag=3)
    recv = entry(0, "recv float32 [9] from rank 0 tag 3", "running", peer=0, tag=3)
    found = findings(record(0, group(send)), record(1, group(recv)))
    assert [finding.kind for finding in found] == ["busy", "busy"]


def test_a_rank_that_is_only_seen_by_its_absence() -> None:
    found = findings(record(0, group(entry(1), ranks=(0, 1))))
    assert [finding.kind for finding in found] == ["unheard", "fine"]
    assert found[0].text == "rank 1 left no record: it is dead, stopped, or was not asked"


def test_a_rank_that_never_made_a_group() -> None:
    (found,) = findings(record(0, group(entry(1, outcome="running"))), record(1, world_size=0))
    assert found.details[-1].startswith("rank 1 has not made the group, or left it; its Python")


def test_many_ranks_are_told_in_short() -> None:
    ranks = range(1000)
    (found,) = findings(record(0, group(entry(1, outcome="running"), ranks=ranks), world_size=1000))
    assert found.text.endswith("nothing is known of ranks 1 to 999")
    assert found.details[-1] == "and 983 more"


def test_an_interrupted_wait_says_by_what() -> None:
    lost = "failed: PeerLostError: rank 0: lost rank 1: rank 1 died\nmore"
    fault = RecordedFault(1.0, "PeerLostError: lost rank 1", (1,))
    (found,) = findings(record(0, group(entry(1, outcome=lost)), faults=(fault,)))
    assert found.text.endswith("rank 0 failed in barrier at train.py:7 in step; rank 1 is lost")
    assert found.details[0] == 'rank 0 said "PeerLostError: rank 0: lost rank 1: rank 1 died"'


def test_names_of_ranks() -> None:
    assert named([1, 0]) == "ranks 0 and 1"
    assert named([5, 3, 1]) == "ranks 1, 3 and 5"
    assert named([0, 1, 2, 3]) == "ranks 0 to 3"


# -- files ------------------------------------------------------------------------------------

small = st.integers(-1, 5)
texts = st.sampled_from(["barrier", "send x to rank 1", "recv x", "", "all_reduce f [1]", "\x1b["])
outcomes = st.sampled_from(
    ["running", "done", "failed: CollectiveTimeoutError: x", "failed: CollectiveMismatchError: x"]
)
entries = st.builds(
    Entry,
    st.integers(0, 4),
    texts,
    texts,
    st.just(1.0),
    st.none() | st.just(2.0),
    outcomes,
    st.none() | small,
    small,
)
ranks = st.lists(st.integers(0, 4), max_size=5).map(tuple)
logs = st.builds(
    GroupLog,
    st.sampled_from("ab"),
    st.just("shm"),
    st.just(""),
    st.sampled_from([(0, 1, 2), (0, 1), (3,), ()]),
    st.lists(entries, max_size=6).map(tuple),
)
stacks = st.builds(Stack, texts, st.lists(texts, max_size=2).map(tuple), texts, st.booleans())
records = st.builds(
    Record,
    st.integers(0, 4),
    st.integers(0, 6),
    texts,
    st.just(1),
    st.just(""),
    st.just(3.0),
    st.lists(st.builds(RecordedFault, st.just(1.0), texts, ranks), max_size=2).map(tuple),
    st.lists(stacks, max_size=2).map(tuple),
    st.lists(logs, max_size=3).map(tuple),
)


@given(st.lists(records, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_whatever_records_say_something_is_told(made: list[Record]) -> None:
    found = findings(*made)
    assert found
    assert all(finding.text for finding in found)


@given(records)
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read(made: Record) -> None:
    again = decode(encode(made))
    # But for what a terminal would obey.
    assert encode(again) == encode(made).replace(b"\\u001b", b"?")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@given(records, st.data())
@settings(max_examples=100, deadline=None)
def test_a_field_of_another_kind_is_refused_or_harmless(made: Record, data: st.DataObject) -> None:
    document = json.loads(encode(made))
    places = [(document, key) for key in document]
    for log in document["groups"]:
        places += [(log, key) for key in log]
        places += [(item, key) for item in log["entries"] for key in item]
    place, key = data.draw(st.sampled_from(places))
    place[key] = data.draw(values)
    try:
        read = decode(json.dumps(document).encode())
    except FlightRecordError:
        return
    assert findings(read)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FlightRecordError):
        decode(data)


def test_a_long_record_keeps_the_latest_and_what_runs() -> None:
    many = [entry(1, outcome="running"), *(entry(n) for n in range(2, 100))]
    assert [e.number for e in latest(many, 3)] == [1, 97, 98, 99]
    full = record(0, group(*[entry(n, "x" * 5000) for n in range(MAX_ENTRIES)]))
    assert len(decode(encode(full)).groups[0].entries) == MAX_ENTRIES


def test_groups_of_any_ranks_are_written_and_read() -> None:
    for ranks in ((), (0,), (3, 4, 5), (5, 4, 3), (0, 2, 3, 9), tuple(range(10_000))):
        written = record(0, group(entry(1), ranks=ranks))
        assert decode(encode(written)) == written
    assert len(encode(record(0, group(ranks=range(10_000))))) < 1000


def test_ranks_without_end_are_refused() -> None:
    document = json.loads(encode(record(0, group(entry(1)))))
    document["groups"][0]["ranks"] = [[0, 1 << 15]] * 3
    with pytest.raises(FlightRecordError, match="more than 65536 ranks"):
        decode(json.dumps(document).encode())
    for runs, message in (([[3, 1]], "got 3 to 1"), ([7], "a pair of numbers, got 7")):
        document["groups"][0]["ranks"] = runs
        with pytest.raises(FlightRecordError, match=message):
            decode(json.dumps(document).encode())


def test_messages_that_are_alike_are_one_finding() -> None:
    sends = [
        entry(0, f"send float32 [3] to 1, tag {tag}", "running", peer=1, tag=tag)
        for tag in range(500)
    ]
    (finding,) = findings(record(0, group(*sends)), record(1, group(entry(1)), inside=False))
    assert "and in 499 more like it" in finding.text
    assert "it waits" not in " ".join(finding.details)


def test_a_rank_that_waits_in_much_is_described_shortly() -> None:
    sends = [entry(0, f"send {tag}", "running", peer=1, tag=tag) for tag in range(500)]
    zero = group(*sends, ranks=range(3))
    two = group(entry(0, "recv", "running", peer=0), ranks=range(3))
    one = group(entry(1), ranks=range(3))
    told = findings(record(0, zero), record(1, one, inside=False), record(2, two))
    (line,) = [d for finding in told for d in finding.details if d.startswith("rank 0")]
    assert line.count("it waits in") == 4
    assert line.endswith("and in 496 more")
