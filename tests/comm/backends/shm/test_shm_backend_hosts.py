"""Ranks that cannot share memory are told so; nothing is guessed from names."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Runner

CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000


def leave_the_network() -> None:
    """Become, for sockets, another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this system lets nobody make network namespaces")


def may_leave() -> bool:
    pid = os.fork()
    if not pid:
        try:
            leave_the_network()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


needs_namespaces = pytest.mark.skipif(not may_leave(), reason="needs network namespaces")


@needs_namespaces
def test_another_host_is_told(processes: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 2:
            leave_the_network()
        store = dist.FileStore(os.fspath(tmp_path / "store"), 3)
        with pytest.raises(dist.DistBackendError, match="rank 2 cannot share memory") as caught:
            dist.init_process_group(
                "shm", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=120)
            )
        assert not dist.is_initialized()
        return str(caught.value)

    for text in processes(3, body):
        assert "gloo" in text


@needs_namespaces
def test_without_a_named_backend_hybrid_steps_in(processes: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            leave_the_network()
        store = dist.FileStore(os.fspath(tmp_path / "store"), 2)
        try:
            dist.init_process_group(
                store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1.5)
            )
        except RuntimeError as error:
            return str(error)
        return dist.get_backend()

    # There is no network between the two, so hybrid cannot work either, but it is what is tried.
    for text in processes(2, body):
        assert "not connected with ranks" in text


def test_one_host_without_a_named_backend_is_shm(processes: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> str:
        store = dist.FileStore(os.fspath(tmp_path / "store"), 2)
        dist.init_process_group(store=store, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        return dist.get_backend()

    assert processes(2, body) == ["shm", "shm"]
