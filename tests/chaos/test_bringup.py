"""Whatever strangers and false hosts send while a shm group is made, it is made, or refused."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilework.distributed as dist
from tests.chaos.rank_program import settled
from tests.faults.forked_ranks import Holdings
from tilework.comm.backends.shm import shm_backend
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(not dist.is_shm_available(), reason="the core is not built")


def request(store: dist.Store, rank: int) -> dist.DistributedBackendOptions:
    return dist.DistributedBackendOptions(store, rank, 2, timedelta(seconds=120), "g", (0, 1))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=5))
def test_no_bytes_from_strangers_keep_a_group_from_being_made(noises: list[bytes]) -> None:
    store = dist.HashStore()

    def program(rank: int) -> str:
        if rank == 1:
            name = store.get("shm/host").decode().split(" ")[0]
            for noise in noises:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.connect(f"\0{name}")
                    stranger.send(noise)
        group = shm_backend.create_shm_group(request(store, rank), None)
        group.barrier()
        group.close()
        return "made"

    assert run_ranks(2, program, init=False) == ["made"] * 2


Answer = Callable[[socket.socket], None]


@contextmanager
def false_host(store: dist.Store, answer: Answer) -> Iterator[None]:
    """Somebody who says that it is rank 0, and answers one rank like this."""
    name = f"tilework-false-{secrets.token_hex(8)}"

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            answer(connection)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        store.set("shm/host", f"{name} {bytes(16).hex()} here")
        store.set("shm/verdict", "failed:as the host said")
        yield
        thread.join()


def hand_over(*descriptors: int) -> Answer:
    def answer(connection: socket.socket) -> None:
        socket.send_fds(connection, [b"S"], list(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)

    return answer


def memory_file(size: int) -> int:
    descriptor = os.memfd_create("false", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


ANSWERS: dict[str, Callable[[], Answer]] = {
    "silence": lambda: lambda connection: None,
    "bytes only": lambda: lambda connection: connection.sendall(b"S"),
    "many bytes": lambda: lambda connection: connection.sendall(b"\xff" * 5000),
    "no memory": lambda: hand_over(os.open(os.devnull, os.O_RDWR)),
    "a directory": lambda: hand_over(os.open("/", os.O_RDONLY)),
    "empty memory": lambda: hand_over(memory_file(0)),
    "unsealed memory": lambda: hand_over(memory_file(1 << 20)),
    "several descriptors": lambda: hand_over(*(memory_file(4096) for _ in range(5))),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_false_host_is_refused_and_nothing_is_left(answer: str) -> None:
    before = Holdings.now()
    with dist.HashStore() as store, false_host(store, ANSWERS[answer]()):
        with pytest.raises(dist.DistBackendError, match="as the host said"):
            shm_backend.create_shm_group(request(store, 1), None)
        assert b"cannot share memory" in store.get("shm/refused")
    assert settled(before).within(before)


@given(st.text())
def test_any_verdict_is_an_error(verdict: str) -> None:
    assert isinstance(shm_backend._error_of(verdict), dist.DistBackendError)
