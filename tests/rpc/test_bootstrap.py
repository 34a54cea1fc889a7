"""init_rpc: how workers find each other, and what they are told when they cannot."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tilework.distributed as dist
from tests.rpc.joined_ranks import identity, join, my_name, together
from tilework import rpc
from tilework.errors import CollectiveMismatchError, DistBackendError, DistError, DistStoreError
from tilework.testing import run_ranks
from tilework.testing.ranks import Kind

Options = rpc.RpcBackendOptions


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_and_leave(rank: int, n: int) -> str:
    seen: str = rpc.rpc_sync((rank + 1) % n, my_name)
    rpc.shutdown(timeout=120)
    return seen


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_by_a_file(tmp_path: Path, kind: Kind) -> None:
    def body(rank: int) -> str:
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], num_worker_threads=4)
        options.init_method = f"file://{tmp_path}/meeting"
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        return serve_and_leave(rank, 3)

    assert run_ranks(3, body, kind=kind, init=False) == ["w1", "w2", "w0"]


def test_by_tcp_and_the_jobs_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_SECRET", "ab" * 16)
    port = free_port()

    def body(rank: int) -> str:
        options = Options(init_method=f"tcp://127.0.0.1:{port}?rank={rank}&world_size=2")
        rpc.init_rpc(f"w{rank}", rpc_backend_options=options)
        return serve_and_leave(rank, 2)

    assert run_ranks(2, body, kind="processes", init=False) == ["w1", "w0"]


def test_by_a_store_that_has_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_SECRET", raising=False)
    limit, port = timedelta(seconds=120), free_port()

    def body(rank: int) -> str:
        with dist.TCPStore("127.0.0.1", port, 2, rank == 0, limit, secret=b"ours") as store:
            dist.init_process_group("threads", store=store, rank=rank, world_size=2)
            rpc.init_rpc(f"w{rank}")
            seen = serve_and_leave(rank, 2)
            dist.barrier()
            dist.destroy_process_group()
        return seen

    assert run_ranks(2, body, init=False) == ["w1", "w0"]


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    def body(rank: int) -> str:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TILEWORK_SECRET="cd" * 16,
        )
        rpc.init_rpc(f"w{rank}")
        return serve_and_leave(rank, 2)

    assert run_ranks(2, body, kind="processes", init=False) == ["w1", "w0"]


def test_with_the_default_groups_ranks_or_others() -> None:
    def body(rank: int) -> tuple[int, int]:
        other = (rank + 1) % 3
        rpc.init_rpc(f"w{other}", rank=other, world_size=3)
        found = rpc.get_worker_info().id, dist.get_rank()
        rpc.shutdown()
        return found

    assert run_ranks(3, body) == [(1, 0), (2, 1), (0, 2)]


def test_again_after_shutdown() -> None:
    def body(rank: int) -> list[str]:
        seen = []
        for turn in range(4):
            rpc.init_rpc(f"turn{turn}.{rank}")
            seen.append(rpc.rpc_sync(1 - rank, my_name))
            rpc.shutdown(graceful=turn % 2 == 0)
            assert not rpc.is_initialized()
            dist.barrier()
        return seen

    assert run_ranks(2, body)[0] == ["turn0.1", "turn1.1", "turn2.1", "turn3.1"]


def test_twice_is_an_error() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"initialized already: call rpc\.shutdown"):
            join(rank)

    together(2, program)


def test_before_init() -> None:
    def body(rank: int) -> None:
        assert not rpc.is_initialized()
        assert not rpc.is_current_rpc_agent_set()
        for act in (
            lambda: rpc.rpc_sync("w0", my_name),
            lambda: rpc.rpc_async("w0", my_name),
            lambda: rpc.remote("w0", my_name),
            lambda: rpc.RRef(1),
            rpc.get_worker_info,
            rpc.get_worker_infos,
            rpc.barrier,
            rpc.shutdown,
        ):
            with pytest.raises(
                RuntimeError, match=r"RPC has not been initialized. Call rpc\.init_rpc"
            ):
                act()

    run_ranks(1, body)


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "ä"])
def test_bad_names_are_told_to_all(name: str) -> None:
    def body(rank: int) -> str:
        with pytest.raises(DistError if rank else ValueError) as caught:
            rpc.init_rpc("fine" if rank else name)
        with pytest.raises(DistError if rank else TypeError, match="a worker's name is a str"):
            rpc.init_rpc("fine" if rank else 1)  # type: ignore[arg-type]
        assert not rpc.is_initialized()
        return str(caught.value)

    first, *others = run_ranks(3, body)
    assert "a worker's name has 1 to 127" in first
    assert others == [f"init_rpc failed: rank 0 raised ValueError: {first}"] * 2


def test_bad_options() -> None:
    with pytest.raises(TypeError, match="must be an RpcBackendOptions"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_worker_threads"):
        Options(num_worker_threads=0)
    with pytest.raises(ValueError, match="must not be negative"):
        Options(rpc_timeout=-5)
    assert Options(rpc_timeout=timedelta(minutes=2)).rpc_timeout == 120
    assert Options(rpc_timeout=0).rpc_timeout == float("inf")


def errors(n: int, body: Any, seconds: float = 120.0) -> list[BaseException]:
    """What each rank of ``body`` raises, soon."""
    begun = time.monotonic()
    found: list[BaseException] = run_ranks(n, body, return_exceptions=True)
    assert time.monotonic() - begun < seconds
    return found


def test_one_name_for_two_workers_is_told_to_all() -> None:
    def body(rank: int) -> None:
        rpc.init_rpc("same" if rank else "other")

    for error in errors(3, body):
        assert isinstance(error, ValueError)
        assert "names must be unique: ranks [1, 2] are all called 'same'" in str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_another_world_size_is_told_to_all(odd: int) -> None:
    def body(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=4 if rank == odd else 3)

    for error in errors(3, body):
        assert isinstance(error, CollectiveMismatchError)
        assert "world_size=3" in str(error)
        assert "world_size=4" in str(error)


def test_one_rank_for_two_workers_is_told_to_all() -> None:
    def body(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=min(rank, 1), world_size=3)

    for error in errors(3, body):
        assert isinstance(error, CollectiveMismatchError)
        assert "two workers say that they are rank 1" in str(error)


def test_other_secrets_are_told_to_all(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        os.environ["TILEWORK_SECRET"] = "ab" if rank == 1 else "cd"
        options = Options(init_method=f"file://{tmp_path}/meeting")
        with pytest.raises(CollectiveMismatchError, match=r"ranks \[1\] have another secret") as e:
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        return str(e.value)

    run_ranks(2, body, kind="processes", init=False)


def test_who_does_not_come_is_named() -> None:
    def body(rank: int) -> None:
        if rank != 1:
            rpc.init_rpc(f"w{rank}", rpc_backend_options=Options(rpc_timeout=0.5))
        assert rank == 1

    first, second, third = errors(3, body)
    for error in (first, third):
        assert isinstance(error, DistStoreError)
        assert "ranks [1] of 3 did not call it within 0.5 s" in str(error)
    assert second is None


def test_after_a_failure_one_may_try_again() -> None:
    def body(rank: int) -> str:
        with pytest.raises(ValueError, match="must be unique"):
            rpc.init_rpc("same")
        rpc.init_rpc(f"w{rank}")
        return serve_and_leave(rank, 2)

    assert run_ranks(2, body) == ["w1", "w0"]


def test_where_strangers_can_read_the_store_there_is_no_rpc() -> None:
    port = free_port()

    def body(rank: int) -> None:
        options = Options(init_method=f"tcp://127.0.0.1:{port}")
        with pytest.raises(DistBackendError, match="TILEWORK_SECRET"):
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    run_ranks(2, body, init=False)


def test_rank_and_size_must_fit() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="rank must be from 0 to world_size - 1, got 2 of 2"):
            rpc.init_rpc("w", rank=2, world_size=2)

    run_ranks(2, body)


def test_a_dtype_a_function_and_a_rank_are_enough_for_one_worker() -> None:
    assert together(1, lambda rank: rpc.rpc_sync(0, identity, args=(rank,))) == [0]
