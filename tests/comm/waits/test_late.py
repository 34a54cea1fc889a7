"""Who is late for a collective is told on stderr, once for all that wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backend import core_error
from tilework.store import StoreServer, TCPStore
from tilework.store.late_notice import LATE_VARIABLE
from tilework.testing import run_ranks


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_one_line_says_who_is_awaited_where_and_what_it_did_last(
    backend: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if backend == "shm" and core_error():
        pytest.skip(str(core_error()))
    monkeypatch.setenv(LATE_VARIABLE, "0.5")
    told: list[str] = []

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 2:  # until the others have told of it
            deadline = time.monotonic() + 60
            while "waits for rank 2" not in "".join(told) and time.monotonic() < deadline:
                time.sleep(0.02)
                told.append(capfd.readouterr().err)
        dist.all_reduce(torch.ones(3))

    run_ranks(3, program, backend=backend)
    lines = [line for line in "".join(told).splitlines() if "waits for rank 2" in line]
    assert len(lines) == 1
    assert "rank 0 waits for rank 2 in all_reduce" in lines[0]
    assert "test_late.py" in lines[0]
    assert "rank 2 last entered #1 barrier" in lines[0]


def recv_from(rank: int) -> None:
    dist.recv(torch.zeros(3), rank)


def wait_for_recv_from(rank: int) -> None:
    works = [dist.irecv(torch.zeros(3), rank, tag=tag) for tag in (0, 1)]
    for work in works:
        assert work is not None
        work.wait()


def recv_from_any(rank: int) -> None:
    dist.recv(torch.zeros(3))


def send_large_to(rank: int) -> None:
    dist.send(torch.zeros(1 << 20), rank)


@pytest.mark.parametrize(
    ("backend", "wait", "expected"),
    [
        ("threads", recv_from, "rank 0 waits for rank 2 in recv float32 [3] from rank 2 tag 0"),
        ("threads", wait_for_recv_from, "waits for rank 2 in recv float32 [3] from rank 2 tag 0"),
        ("shm", recv_from, "rank 0 waits for rank 2 in recv float32 [3] from rank 2 tag 0"),
        ("shm", wait_for_recv_from, "waits for rank 2 in recv float32 [3] from rank 2 tag 0"),
        ("shm", recv_from_any, "rank 0 waits for any rank in recv float32 [3] from any rank"),
        ("shm", send_large_to, "waits for rank 2 in send float32 [1048576] to rank 2 tag 0"),
    ],
)
def test_messages(
    backend: str,
    wait: Callable[[int], None],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if backend == "shm" and core_error():
        pytest.skip(str(core_error()))
    monkeypatch.setenv(LATE_VARIABLE, "0.4")
    told: list[str] = []

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            wait(2)
        if rank == 2:
            deadline = time.monotonic() + 60
            while "waits for" not in "".join(told) and time.monotonic() < deadline:
                time.sleep(0.02)
                told.append(capfd.readouterr().err)
            if wait is send_large_to:
                dist.recv(torch.zeros(1 << 20), 0)
            else:
                dist.send(torch.ones(3), 0)
            if wait is wait_for_recv_from:
                dist.send(torch.ones(3), 0, tag=1)

    run_ranks(3, program, backend=backend)
    lines = [line for line in "".join(told).splitlines() if "waits for" in line]
    assert expected in lines[0]
    assert "test_late.py" in lines[0]
    assert ("rank 2 last entered #1 barrier" in lines[0]) is (wait is not recv_from_any)


def test_a_wait_that_is_not_long_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        time.sleep(0.6 if rank == 1 else 0.0)
        dist.barrier()

    run_ranks(2, program)
    assert "waits for" not in capfd.readouterr().err


def test_a_store_that_is_gone_is_named_while_ranks_wait(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        server.start()

        def program(rank: int) -> None:
            store = TCPStore("127.0.0.1", server.port)
            dist.init_process_group("threads", store=store, rank=rank, world_size=2)
            dist.barrier()
            if rank == 0:
                server.close()
                deadline = time.monotonic() + 60
                while "is gone" not in "".join(told) and time.monotonic() < deadline:
                    time.sleep(0.02)
                    told.append(capfd.readouterr().err)
            dist.barrier()

        run_ranks(2, program, init=False)
    lines = [line for line in "".join(told).splitlines() if "is gone" in line]
    assert len(lines) == 1
    assert f"the store server at 127.0.0.1:{server.port} is gone" in lines[0]
