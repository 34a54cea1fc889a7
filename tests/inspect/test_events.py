"""Trace events: a schema of the format, nesting, arrows that pair."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.inspect.jobs import MS, late_step, operation, traced, write_rank
from tilework.inspect import MemoryByUse, read_timeline, trace
from tilework.inspect.events import trace_events
from tilework.testing import run_ranks

#: By phase: the keys of an event besides those of all events, and their types.
SCHEMA: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"dur": (int, float), "cat": str, "args": dict},
    "M": {"args": dict},
    "s": {"id": int, "cat": str},
    "C": {"args": dict},
    "i": {"s": str},
    "f": {"id": int, "cat": str, "bp": str},
}
OF_ALL: dict[str, type | tuple[type, ...]] = {
    "ph": str,
    "name": str,
    "pid": int,
    "tid": int,
    "ts": (int, float),
}


def check(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a document that follows the schema."""
    events: list[dict[str, Any]] = json.loads(json.dumps(document, allow_nan=False))["traceEvents"]
    for event in events:
        schema = OF_ALL | SCHEMA[event["ph"]]
        assert set(event) == set(schema)
        assert all(isinstance(event[key], kind) for key, kind in schema.items())
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """By rank and track: start and end of the slices."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return found


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    return check(trace_events(traced(folder, late_step(2)).timeline()))


def test_slices_of_a_track_nest(events: list[dict[str, Any]]) -> None:
    for each in slices(events).values():
        open_ends: list[float] = []
        for start, end in sorted(each, key=lambda pair: (pair[0], -pair[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_arrows_pair_and_begin_within_slices(events: list[dict[str, Any]]) -> None:
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    all_slices = slices(events)
    assert arrows
    for start, end in arrows.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"] + 1e-3
        for each in (start, end):
            own = all_slices[each["pid"], each["tid"]]
            assert any(a - 1e-3 <= each["ts"] <= b + 1e-3 for a, b in own)


def test_each_collective_has_a_slice_on_each_rank_and_they_overlap(
    events: list[dict[str, Any]],
) -> None:
    calls = defaultdict(list)
    for event in events:
        if event.get("cat") == "operation":
            calls[event["args"]["number"]].append(event)
    assert len(calls) == 41
    for each in calls.values():
        assert sorted(event["pid"] for event in each) == [0, 1, 2, 3]
        assert max(e["ts"] for e in each) <= min(e["ts"] + e["dur"] for e in each) + 1e-3


def test_waiting_and_moving_are_cut_at_the_last_entry(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [operation(1, 0, 8), ["z", 10 * MS]])
    write_rank(tmp_path, 1, [operation(1, 6, 9), ["z", 10 * MS]])
    found = check(trace_events(read_timeline(tmp_path)))
    parts = [
        (e["pid"], e["name"], e["ts"], e["dur"]) for e in found if e.get("cat") in ("wait", "move")
    ]
    assert parts == [
        (0, "wait for rank 1", 0.0, 6000.0),
        (0, "move", 6000.0, 2000.0),
        (1, "move", 6000.0, 3000.0),
    ]


def test_tracks_have_names(events: list[dict[str, Any]]) -> None:
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"program", "group default", "engine default"}


def test_an_arrow_leads_from_a_send_to_its_receive(tmp_path: Path) -> None:
    def step(rank: int) -> None:
        if rank == 0:
            time.sleep(0.1)  # the receiver waits, unless it gets no core for so long
            dist.send(torch.ones(3), 1, tag=4)
        else:
            dist.recv(torch.ones(3), 0, tag=4)

    found = check(trace_events(traced(tmp_path, step, ranks=2, steps=3).timeline()))
    assert [(e["ph"], e["pid"]) for e in found if e["ph"] in "sf"][:6] == [("s", 0), ("f", 1)] * 3


def test_events_of_torch_lie_within_the_spans_that_ran_them(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path), torch.profiler.profile(), dist.span("forward"):
            torch.ones(8).sum()

    run_ranks(1, program)
    found = check(trace_events(read_timeline(tmp_path)))
    forward = next(e for e in found if e["name"] == "forward")
    sums = [e for e in found if e["name"] == "aten::sum"]
    assert {e["cat"] for e in sums} == {"torch"}
    assert forward["ts"] <= sums[0]["ts"] <= forward["ts"] + forward["dur"]


def test_events_of_torch_that_overlap_get_tracks_of_their_own(tmp_path: Path) -> None:
    names = [["t", 9, "kernel"], ["h", -1, "torch: device 0 stream 7"]]
    events = [["p", -1, at * MS, (at + 3) * MS, 9] for at in (0, 2, 4)]
    write_rank(tmp_path, 0, [*names, *events, ["z", 9 * MS]])
    found = check(trace_events(read_timeline(tmp_path)))
    assert len({e["tid"] for e in found if e.get("cat") == "torch"}) == 2


def test_memory_is_a_counter(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path), MemoryByUse():
            kept = torch.zeros(100)
            del kept
            time.sleep(0.002)
            torch.zeros(50)

    run_ranks(1, program)
    counts = [e["args"] for e in check(trace_events(read_timeline(tmp_path))) if e["ph"] == "C"]
    assert counts[0] == {"activations": 400}
    assert counts[-1] == {"activations": 200}


def test_an_operation_that_still_runs_lasts_until_the_end(tmp_path: Path) -> None:
    running = operation(1, 1, 0)
    running[12] = 9
    write_rank(tmp_path, 0, [["t", 9, "running"], running, ["z", 5 * MS]])
    found = check(trace_events(read_timeline(tmp_path)))
    assert [(e["ts"], e["dur"]) for e in found if e.get("cat") == "operation"] == [(0.0, 4000.0)]
    assert list(read_timeline(tmp_path).waits) == []
