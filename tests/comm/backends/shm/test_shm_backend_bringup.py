"""Making a shm group where something is wrong: strangers, deaths. See also
test_shm_backend_hosts.py."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest

import tilework.distributed as dist
from tests.limits import PROMPTLY
from tests.tables import each
from tilework.comm.backends.shm import shm_backend
from tilework.comm.groups import init_process_group
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(not dist.is_shm_available(), reason="the core is not built")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_a_rank_that_dies_while_joining_fails_the_others_at_once(path: str) -> None:
    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def program(rank: int) -> str:
        if rank == 1:
            shm_backend._map = die  # type: ignore[assignment]
        init_process_group("shm", store=dist.FileStore(path), rank=rank, world_size=3)
        return "made"

    start = time.monotonic()
    errors = run_ranks(3, program, kind="processes", init=False, return_exceptions=True)
    assert time.monotonic() - start < PROMPTLY
    assert "SIGKILL" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], dist.DistBackendError)
        assert "rank 1 ended while joining" in str(errors[rank])


def request(store: dist.Store, rank: int) -> dist.DistributedBackendOptions:
    return dist.DistributedBackendOptions(store, rank, 2, timedelta(seconds=120), "g", (0, 1))


def knock(store: dist.Store, hello: bytes) -> list[int]:
    """Connect to rank 0's socket, send ``hello``, return the descriptors that it hands over."""
    name, _, _ = store.get("shm/host").decode().split(" ", 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(5.0)
        stranger.connect(f"\0{name}")
        try:
            stranger.send(hello)
            return socket.recv_fds(stranger, 1, 4)[1]
        except (BrokenPipeError, ConnectionResetError):  # hung up on before a word was said
            return []


@each("hello", [b"x", b"\x00" * 20, b"\xff" * 4096])
def test_a_stranger_at_the_socket_is_handed_nothing(hello: bytes) -> None:
    store = dist.HashStore()

    def program(rank: int) -> str:
        if rank == 1:
            assert knock(store, hello) == []
        group = shm_backend.create_shm_group(request(store, rank), None)
        group.barrier()
        group.close()
        return "made all the same"

    assert run_ranks(2, program, init=False) == ["made all the same"] * 2


def test_the_socket_name_does_not_tell_the_nonce() -> None:
    store = dist.HashStore()

    def program(rank: int) -> bool:
        shm_backend.create_shm_group(request(store, rank), None).close()
        name, nonce, _ = store.get("shm/host").decode().split(" ", 2)
        return nonce in name

    assert run_ranks(2, program, init=False) == [False, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_handed_nothing_even_with_the_nonce(path: str) -> None:
    def program(rank: int) -> str:
        store = dist.FileStore(path)
        if rank == 2:
            os.chmod(path, 0o666)  # what it may read is not the point here
            nonce = store.get("shm/host").decode().split(" ", 2)[1]
            os.seteuid(65534)
            handed = knock(store, bytes.fromhex(nonce) + bytes([0, 0, 0, 1]))
            os.seteuid(0)
            store.set("thief", f"was handed {handed}")
        else:
            if rank == 1:
                store.wait(["thief"])
            group = shm_backend.create_shm_group(request(store, rank), None)
            group.barrier()
            group.close()
        return store.get("thief").decode()

    assert run_ranks(3, program, kind="processes", init=False) == ["was handed []"] * 3
