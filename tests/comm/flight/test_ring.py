"""The flight record's ring: what it keeps of operations, and how little."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.flight.ring import ANY_PEER, Entry, Ring, capacity_setting
from tilework.testing import run_ranks

HERE = "test_ring.py"


def entries_of(group: object = None) -> list[Entry]:
    pg = dist.get_default_group() if group is None else group
    assert isinstance(pg, dist.ProcessGroup)
    return pg.flight_entries()


# -- the ring alone ---------------------------------------------------------------------------


def test_an_operation_from_call_to_end() -> None:
    ring = Ring(4)
    slot = ring.begin(("all_reduce", torch.float32, (), [torch.Size([2, 3])], "sum", None))
    (running,) = ring.entries()
    assert (running.number, running.outcome, running.ended) == (1, "running", None)
    assert running.what == "all_reduce float32 [2, 3] SUM"
    assert HERE in running.site
    assert running.site.endswith(" in test_an_operation_from_call_to_end")
    ring.end(slot)
    (done,) = ring.entries()
    assert done.outcome == "done"
    assert done.ended is not None
    assert done.ended >= done.entered


def test_a_failure_is_kept_with_its_reason() -> None:
    ring = Ring()
    ring.end(ring.begin("barrier"), "PeerLostError: lost rank 1")
    assert ring.entries()[0].outcome == "failed: PeerLostError: lost rank 1"


def test_it_keeps_the_latest_and_counts_on() -> None:
    ring = Ring(3)
    for _ in range(10):
        ring.end(ring.begin("barrier"))
    assert [entry.number for entry in ring.entries()] == [8, 9, 10]


def test_what_still_runs_is_not_pushed_out() -> None:
    ring = Ring(2)
    late = ring.begin("recv float32 [3] from rank 1 tag 0", peer=1)
    for _ in range(5):
        ring.end(ring.begin("barrier"))
    assert [entry.what.split()[0] for entry in ring.entries()] == ["recv", "barrier", "barrier"]
    ring.end(late)
    assert [entry.what for entry in ring.entries()] == ["barrier", "barrier"]


def test_messages_are_not_numbered() -> None:
    ring = Ring()
    ring.begin("barrier")
    ring.begin("recv float32 [3] from any rank tag 7", peer=ANY_PEER, tag=7)
    ring.begin("barrier")
    assert [(e.number, e.peer, e.tag) for e in ring.entries()] == [
        (1, None, 0),
        (0, ANY_PEER, 7),
        (2, None, 0),
    ]


class Ticket:
    def __init__(self, fault: tuple[str, tuple[int, ...], str] | None = None) -> None:
        self.over = False
        self._fault = fault

    def done(self) -> bool:
        return self.over

    def fault(self) -> tuple[str, tuple[int, ...], str] | None:
        return self._fault


def test_work_that_nobody_waits_for_is_asked_when_somebody_looks() -> None:
    ring = Ring()
    well, ill = Ticket(), Ticket(("timeout", (1,), "waited 2 s"))
    for ticket in (well, ill):
        ring.follow(ring.begin("barrier"), ticket)
    assert [entry.outcome for entry in ring.entries()] == ["running", "running"]
    well.over = ill.over = True
    assert [entry.outcome for entry in ring.entries()] == ["done", "failed: timeout waited 2 s"]


@pytest.mark.parametrize(
    ("text", "capacity"),
    [("", 256), ("16", 16), ("many", 256), ("-3", 256), ("9" * 30, 65536), ("0", 0)],
)
def test_how_many_are_kept_can_be_set(
    text: str, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWORK_FLIGHT_ENTRIES", text)
    assert capacity_setting() == capacity
    ring = Ring()
    for _ in range(300):
        ring.end(ring.begin("barrier"))
    assert len(ring.entries()) == min(300, max(1, capacity))


def test_it_can_be_read_while_others_write() -> None:
    ring, stop = Ring(64), threading.Event()

    def write() -> None:
        while not stop.is_set():
            ring.end(ring.begin("barrier"))

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            assert all(entry.what == "barrier" for entry in ring.entries())
    finally:
        stop.set()
        for writer in writers:
            writer.join()


# -- in groups --------------------------------------------------------------------------------


@pytest.fixture(params=["threads", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def everything(rank: int) -> list[Entry]:
    x = torch.ones(2, 3)
    dist.broadcast(x, src=1)
    dist.reduce(x, dst=0, op=dist.ReduceOp.MAX)
    work = dist.all_gather_into_tensor(torch.empty(4, 3), x, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(x, 1, tag=5)
    else:
        dist.recv(x, 0, tag=5)
    dist.all_reduce(x)
    dist.barrier()
    return entries_of()


def test_groups_keep_what_was_called(backend: str) -> None:
    zero, one = run_ranks(2, everything, backend=backend)
    assert [entry.number for entry in zero] == [1, 2, 3, 0, 4, 5]
    assert [entry.what for entry in zero] == [
        "broadcast float32 [2, 3] root 1",
        "reduce float32 in [2, 3], out [2, 3] MAX root 0",
        "all_gather_into_tensor float32 in [2, 3], out [4, 3]",
        "send float32 [2, 3] to rank 1 tag 5",
        "all_reduce float32 [2, 3] SUM",
        "barrier",
    ]
    assert one[3].what == "recv float32 [2, 3] from rank 0 tag 5"
    assert (zero[3].peer, one[3].peer, one[3].tag) == (1, 0, 5)
    for entry in (*zero, *one):
        assert entry.outcome == "done"
        assert HERE in entry.site
        assert entry.site.endswith(" in everything")


def test_sub_groups_have_their_own(backend: str) -> None:
    def program(rank: int) -> tuple[int, int, tuple[int | None, ...]]:
        pair = dist.new_group([1, 2])
        if rank == 0:
            return 0, len(entries_of()), ()
        assert isinstance(pair, dist.ProcessGroup)
        x = torch.ones(1)
        dist.send(x, 2, pair) if rank == 1 else dist.recv(x, 1, pair)
        return len(entries_of(pair)), len(entries_of()), tuple(e.peer for e in entries_of(pair))

    # Peers are global ranks.
    assert run_ranks(3, program, backend=backend) == [(0, 0, ()), (1, 0, (2,)), (1, 0, (1,))]


def test_how_an_operation_failed(backend: str) -> None:
    def program(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        assert isinstance(group, dist.ProcessGroup)
        if rank == 1:
            return ""
        with pytest.raises(dist.DistBackendError):
            dist.broadcast(torch.ones(3), src=0, group=group)
        return entries_of(group)[-1].outcome

    told = run_ranks(2, program, backend=backend)[0]
    assert told.startswith(("failed: CollectiveTimeoutError: ", "failed: PeerLostError: "))


def test_refused_arguments_are_no_operation(backend: str) -> None:
    def program(rank: int) -> list[Entry]:
        memory = torch.ones(4)
        with pytest.raises(ValueError, match="memory"):
            dist.all_gather_into_tensor(memory, memory[1:3])
        return entries_of()

    assert run_ranks(2, program, backend=backend) == [[], []]


def test_no_tensor_is_kept_alive(backend: str) -> None:
    def program(rank: int) -> bool:
        x = torch.ones(100)
        gone = weakref.ref(x)
        dist.broadcast(x, src=0)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        del x, work
        dist.barrier()
        gc.collect()
        return gone() is None and len(entries_of()) == 4

    assert run_ranks(2, program, backend=backend) == [True, True]


def test_a_group_without_a_record_has_none() -> None:
    class Plain(dist.ProcessGroup):
        pass

    assert Plain(0, 1).flight_entries() == []
