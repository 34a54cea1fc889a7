"""What ``tilework explain`` says of real hangs and faults, each made by real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.flight.failing_jobs import FailingJob, doze
from tests.faults.forked_ranks import ForkedRanks
from tilework.cli import dispatch
from tilework.comm.flight.diagnosis import Finding, Kind
from tilework.launch.flight_records import print_diagnosis


def first_is(kind: Kind, awaited: int = 0, told: int = 0) -> Callable[[list[Finding]], bool]:
    """Whether the first finding is of that kind, about so many ranks that wait or are awaited."""

    def check(findings: list[Finding]) -> bool:
        first = findings[0]
        enough = len(first.awaited) >= awaited and len(first.ranks) >= told
        # Everybody has been heard by now, or never will be.
        return first.kind == kind and enough

    return check


def load_data() -> None:
    doze()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_does_not_come(backend: str, tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.broadcast(torch.ones(3), src=0)
        if rank == 1:
            load_data()
        dist.barrier()

    job = FailingJob(tmp_path, 3, story, backend)
    found = job.findings(
        lambda f: first_is("waiting", told=2)(f) and f[0].number == 2 and "in doze" in str(f)
    )
    assert len(found) == 1
    assert found[0].text.startswith("group 'default', operation #2: ranks 0 and 2 wait in barrier")
    assert found[0].text.endswith("in story; rank 1 has not come")
    (line,) = found[0].details
    assert line.startswith("rank 1 was last in #1 broadcast float32 [3]")
    assert "its Python stack is at" in line
    assert line.endswith("in doze")


def test_a_rank_that_does_not_come_in_time(tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            load_data()
        dist.get_default_group().set_timeout(timedelta(seconds=0.5))
        dist.broadcast(torch.ones(5, 7), src=0)

    job = FailingJob(tmp_path, 2, story)
    (found,) = job.findings(first_is("failed"))
    assert "rank 0 failed in broadcast float32 [5, 7] root 0" in found.text
    assert found.awaited == (1,)
    assert 'rank 0 said "CollectiveTimeoutError: ' in found.details[0]


def test_different_operations(tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            dist.broadcast(torch.ones(5), src=0)
        else:
            dist.reduce(torch.ones(5), dst=0)

    (found,) = FailingJob(tmp_path, 3, story, unasked=range(3)).findings(
        first_is("mismatch", told=3)
    )
    assert found.text == "group 'default', operation #2: ranks called different things"
    lines = "\n".join(found.details)
    assert "rank 1: broadcast float32 [5] root 0 at " in lines
    assert "before that they agreed on #1, barrier at " in lines


def test_different_shapes(tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.broadcast(torch.ones(3 + rank), src=0)

    (found,) = FailingJob(tmp_path, 2, story, unasked=range(2)).findings(
        first_is("mismatch", told=2)
    )
    assert [line.partition(" root")[0] for line in found.details] == [
        "rank 0: broadcast float32 [3]",
        "rank 1: broadcast float32 [4]",
    ]


def rounds(rank: int) -> None:
    while True:
        dist.broadcast(torch.ones(5), src=0)


def test_a_killed_rank(tmp_path: Path) -> None:
    job = FailingJob(tmp_path, 3, rounds, then=lambda ranks: ranks[1].kill(), unasked=range(3))
    (found,) = job.findings(first_is("failed", told=2))
    assert found.ranks == (0, 2)
    assert found.text.endswith("rank 1 is lost")
    assert found.details[-1] == "rank 1 left no record; the others saw it die or leave"


def test_a_stopped_rank(tmp_path: Path) -> None:
    def stop(ranks: ForkedRanks) -> None:
        ranks[1].kill(signal.SIGSTOP)

    found = FailingJob(tmp_path, 3, rounds, then=stop).findings(first_is("waiting", told=2))
    assert found[0].text.endswith("nothing is known of rank 1")
    assert found[0].details[-1].startswith("rank 1 left no record: it is dead, stopped, or")


@pytest.mark.parametrize("unasked", [(), (0, 1)], ids=["while it lasts", "once noticed"])
def test_a_deadlock_over_two_groups(unasked: Sequence[int], tmp_path: Path) -> None:
    def story(rank: int) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        mine = first if rank == 0 else second
        dist.barrier(group=mine)

    job = FailingJob(tmp_path, 2, story, unasked=unasked)
    (found,) = job.findings(first_is("deadlock"))
    assert found.text == "deadlock: ranks 0 and 1 wait for each other in a circle"
    zero, one = sorted(found.details)
    assert zero.startswith("rank 0 waits in group 'group_1', operation #1, barrier at ")
    assert zero.endswith("for rank 1")
    assert one.startswith("rank 1 waits in group 'group_2', operation #1, barrier at ")


@pytest.mark.parametrize("unasked", [(), (0, 1, 2)], ids=["while it lasts", "once noticed"])
def test_a_deadlock_of_receives(unasked: Sequence[int], tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.recv(torch.ones(2), (rank + 1) % 3)

    job = FailingJob(tmp_path, 3, story, unasked=unasked)
    (found,) = job.findings(first_is("deadlock"))
    assert found.text == "deadlock: ranks 0 to 2 wait for each other in a circle"
    assert len(found.details) == 3


def test_a_receive_that_nobody_sends_to(tmp_path: Path) -> None:
    def story(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(2), 1, tag=4)
        dist.send(torch.ones(2), 0, tag=5)
        load_data()

    (found,) = FailingJob(tmp_path, 2, story).findings(
        lambda f: first_is("message", awaited=1)(f) and len(f[0].details) == 2
    )
    assert "rank 0 waits in recv float32 [2] from rank 1 tag 4" in found.text
    assert found.text.endswith("rank 1 has not sent it")
    assert found.details[0].startswith("rank 1 called send float32 [2] to rank 0 tag 5")
    assert found.details[0].endswith("the tags must be equal")


def test_a_rank_that_raises(tmp_path: Path) -> None:
    def story(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            dist.abort_process_group(reason="rank 1 failed: the data is bad")
        else:
            dist.barrier()

    (found,) = FailingJob(tmp_path, 2, story, unasked=range(2)).findings(
        lambda f: first_is("failed", awaited=1)(f) and "was last in #1" in str(f)
    )
    assert 'rank 0 said "PeerLostError: ' in found.details[0]
    assert "it said \"aborted group 'default': rank 1 failed: the data is bad\"" in found.details[1]


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def story(rank: int) -> None:
        dist.barrier()
        load_data()

    job = FailingJob(tmp_path, 2, story)
    (found,) = job.findings(lambda f: first_is("fine", told=2)(f) and "doze" in str(f))
    assert found.text == "every rank is outside of operations: nobody waits for another"
    assert print_diagnosis(job.records) == 0
    assert capsys.readouterr().out.startswith("every rank is outside of operations")


# -- the command ----------------------------------------------------------------------------


def record(rank: int, **fields: object) -> dict[str, object]:
    """A record as a file holds it, of a rank that waits in a barrier unless told otherwise."""
    entry = {
        "number": 1,
        "what": "barrier",
        "site": f"{os.getcwd()}/train.py:7 in step",
        "entered": 1.0,
        "ended": None,
        "outcome": "running",
        "peer": None,
        "tag": 0,
    }
    group = {"name": "default", "backend": "shm", "description": "", "ranks": [[0, 1]]}
    return {
        "tilework_flight": 2,
        "rank": rank,
        "world_size": 2,
        "host": "here",
        "pid": 7,
        "job": "",
        "written": time.time(),
        "faults": [],
        "stacks": [{"thread": "MainThread", "frames": [], "site": "", "inside": True}],
        "groups": [{**group, "entries": [entry]}],
        **fields,
    }


def put(folder: Path, rank: int, **fields: object) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps(record(rank, **fields)))


def test_its_exit_status_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 0)
    assert print_diagnosis(tmp_path) == 1
    out = capsys.readouterr().out
    # Not a terminal: no colours, no line broken; files from the current folder.
    assert out.splitlines()[0] == (
        "group 'default', operation #1: rank 0 waits in barrier at train.py:7 in step; "
        "nothing is known of rank 1"
    )


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 0)
    (tmp_path / "rank-1.json").write_text("{")
    assert print_diagnosis(tmp_path, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1
    assert [finding["kind"] for finding in told["findings"]] == ["waiting"]
    assert told["findings"][0]["awaited"] == [1]
    assert [rank["rank"] for rank in told["ranks"]] == [0]
    assert "rank-1.json is left out: the file is not JSON, or is cut off" in told["problems"][0]


def test_on_a_terminal_it_is_in_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    put(tmp_path, 0)
    assert print_diagnosis(tmp_path) == 1
    assert capsys.readouterr().out.startswith("\x1b[1;33mgroup 'default', operation #1: rank 0")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 0)
    assert dispatch(["explain", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["findings"]
    with pytest.raises(SystemExit) as caught:
        dispatch(["explain"])
    assert caught.value.code == 2


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_diagnosis(tmp_path / "none") == 2
    assert "none': No such file or directory" in capsys.readouterr().err


def test_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_diagnosis(tmp_path) == 2
    assert "there is no flight record in" in capsys.readouterr().out


def test_records_of_an_earlier_run_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, 0, job="new")
    put(tmp_path, 1, job="old", written=1.0)
    assert print_diagnosis(tmp_path) == 1
    out = capsys.readouterr().out
    assert "left out, as they are of another run: rank-1.json" in out
    assert "nothing is known of rank 1" in out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is not JSON, or is cut off"),
        ("\x00\xff" * 100, "the file is not JSON, or is cut off"),
        (json.dumps(record(1))[:-20], "the file is not JSON, or is cut off"),
        ("[" * 100_000, "the file is not JSON, or is cut off"),
        ("9" * 10_000, "the file is not JSON, or is cut off"),
        ("[1]", "the file is not a flight record of tilework"),
        (
            json.dumps(record(1, tilework_flight=3)),
            "the file is of version 3, but this tilework reads version 2",
        ),
        (json.dumps(record(3)), "the file name and the record differ: the record is of rank 3"),
        (json.dumps(record(-1)), "'rank' of the record must be a whole number from 0"),
        (json.dumps(record(1, host=[])), "'host' of the record must be a text"),
        (json.dumps(record(1, host="x" * 9999)), "'host' of the record must be a text of at most"),
        (json.dumps(record(1, written=float("nan"))), "must be a time in seconds, got nan"),
        (json.dumps(record(1, groups=[{}])), "a group lacks 'name'"),
        (json.dumps(record(1, faults=[[]] * 99)), "must be a list of at most 8"),
        (" " * (17 << 20), "the file has more than 16 MiB"),
    ],
)
def test_a_file_that_is_no_record(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, 0)
    (tmp_path / "rank-1.json").write_bytes(text.encode("latin-1"))
    assert print_diagnosis(tmp_path) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank-1.json is left out: ")
    assert problem in first
    assert "rank 0 waits in barrier" in second


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_record_that_is_no_file(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "rank-0.json")
    assert print_diagnosis(tmp_path) == 2
    assert capsys.readouterr().out.startswith("rank-0.json ")


def test_a_terminal_obeys_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 0, faults=[{"time": 1.0, "text": "\x1b]0;owned\x07 [red]x[/]", "ranks": []}])
    put(tmp_path, 1, groups=[])
    assert print_diagnosis(tmp_path) == 1
    assert "\x1b" not in capsys.readouterr().out
