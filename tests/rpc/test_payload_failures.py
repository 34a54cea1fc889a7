"""Workers that are killed, stopped, or interrupted in the middle of calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.forked_ranks import ForkedRanks, Holdings, Say
from tests.limits import PROMPTLY
from tests.rpc.joined_ranks import fork_and_wait, identity, my_name, nothing, until
from tilework import rpc
from tilework.errors import PeerLostError, RpcTimeoutError
from tilework.rpc.rref import current_agent


def join_by_file(rank: int, n: int, folder: Path) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/meeting", rpc_timeout=120)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)


def story(n: int, folder: Path, act: Callable[[int, Say], None]) -> Callable[[int, Say], None]:
    """Join, make sure that all know each other, say "ready", act, leave at once."""

    def tell(rank: int, say: Say) -> None:
        join_by_file(rank, n, folder)
        for to in range(n):
            rpc.rpc_sync(to, nothing)
        rpc.barrier()
        say("ready")
        act(rank, say)
        rpc.shutdown(graceful=False)

    return tell


def lost(call: Callable[[], Any]) -> tuple[float, str, tuple[int, ...]]:
    """When, with what words, and of whom ``call`` says that it was lost."""
    with pytest.raises(PeerLostError) as caught:
        call()
    return time.monotonic(), str(caught.value), caught.value.ranks


def sleep_forever() -> None:
    time.sleep(100)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_fails_the_calls_to_it(number: int, tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        if rank == 1:
            time.sleep(100)
        future = rpc.rpc_async("w1", sleep_forever)
        say(lost(lambda: rpc.rpc_sync("w1", sleep_forever)))
        say(lost(future.wait))
        say(lost(lambda: rpc.rpc_sync("w1", nothing)))  # and those that come later
        say(lost(lambda: rpc.all_gather(rank, timeout=120)))
        say(rpc.rpc_sync(2 - rank, my_name))  # the others go on
        rpc.all_gather(None, ["w0", "w2"])

    with ForkedRanks(3, story(3, tmp_path, act)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(0.1)
        died = ranks[1].kill(number)
        for rank in ranks.others(1):
            for _ in range(2):
                when, text, lost_ranks = rank.hear()
                assert when - died < PROMPTLY
                assert "worker 'w1' (rank 1) died or left before sleep_forever returned" in text
                assert "test_payload_failures.py:" in text
                assert lost_ranks == (1,)
            assert rank.hear()[2] == (1,)
            assert rank.hear()[2] == (1,)
        assert sorted(rank.hear() for rank in ranks.others(1)) == ["w0", "w2"]


def test_who_leads_gatherings_may_die_too(tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        if rank == 0:
            time.sleep(100)
        say(lost(lambda: rpc.barrier(timeout=120)))
        say(lost(lambda: rpc.shutdown(timeout=120)))
        assert not rpc.is_initialized()
        join_by_file(rank - 1, 2, tmp_path / "again")

    (tmp_path / "again").mkdir()
    with ForkedRanks(3, story(3, tmp_path, act)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(0.1)
        died = ranks[0].kill()
        for rank in ranks.others(0):
            for _ in range(2):
                when, _, lost_ranks = rank.hear()
                assert when - died < PROMPTLY
                assert lost_ranks == (0,)


def _free() -> int:
    return current_agent().references.sizes[0]


def test_what_a_dead_worker_held_is_let_go(tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        if rank == 0:
            until(lambda: current_agent().references.sizes[0] == 0)
            say(time.monotonic())
        else:
            kept = rpc.remote("w0", identity, args=(torch.ones(10),))
            kept.to_here()
            say(rpc.rpc_sync("w0", _free))
            time.sleep(100)

    def tell(rank: int, say: Say) -> None:
        join_by_file(rank, 2, tmp_path)
        if rank == 0:
            until(lambda: current_agent().references.sizes[0] == 1)
        act(rank, say)

    with ForkedRanks(2, tell) as ranks:
        assert ranks[1].hear() == 1
        died = ranks[1].kill()
        assert ranks[0].hear() - died < PROMPTLY


def test_memory_of_a_dead_worker_is_freed(tmp_path: Path) -> None:
    """What it lent and did not lend, and what was lent to it and it did not take."""

    def act(rank: int, say: Say) -> None:
        big = torch.ones(1 << 20)
        if rank == 1:
            for _ in range(20):
                rpc.rpc_async("w0", identity, args=(big,))
            say("sent")
            os.kill(os.getpid(), signal.SIGKILL)
        before = Holdings.now()
        say(lost(lambda: [rpc.rpc_sync("w1", identity, args=(big,)) for _ in range(1000)])[2])
        until(lambda: Holdings.now().descriptors <= before.descriptors)
        until(lambda: Holdings.now().segments <= before.segments)
        say("free")

    def tell(rank: int, say: Say) -> None:
        join_by_file(rank, 2, tmp_path)
        rpc.rpc_sync(1 - rank, nothing)
        rpc.rpc_sync(1 - rank, identity, args=(torch.ones(1 << 20),))
        rpc.barrier()
        act(rank, say)

    with ForkedRanks(2, tell) as ranks:
        assert ranks[1].hear() == "sent"
        assert ranks[0].hear() == (1,)
        assert ranks[0].hear() == "free"


def late_ones() -> torch.Tensor:
    time.sleep(1)
    return torch.ones(1 << 20)


def test_an_answer_whose_memory_died_with_its_sender_is_a_lost_worker(tmp_path: Path) -> None:
    """It was sent and not yet read: the caller stood still meanwhile."""

    def act(rank: int, say: Say) -> None:
        if rank == 1:
            time.sleep(100)
        say("asks")
        say(lost(lambda: rpc.rpc_sync("w1", late_ones))[2])

    with ForkedRanks(2, story(2, tmp_path, act)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        assert ranks[0].hear() == "asks"
        time.sleep(0.1)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        time.sleep(2)
        ranks[1].kill()
        ranks[1].reap()
        os.kill(ranks[0].pid, signal.SIGCONT)
        assert ranks[0].hear() == (1,)


def test_a_worker_that_stands_still_is_a_timeout_and_goes_on(tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        if rank == 1:
            time.sleep(8)
            return
        while True:
            try:
                rpc.rpc_sync("w1", nothing, timeout=0.5)
            except RpcTimeoutError as error:
                say(str(error))
                break
        say(rpc.rpc_sync("w1", my_name))

    with ForkedRanks(2, story(2, tmp_path, act)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        ranks[1].kill(signal.SIGSTOP)
        assert (
            "RPC ran for more than set timeout (0.5 s): nothing on worker 'w1'" in ranks[0].hear()
        )
        ranks[1].kill(signal.SIGCONT)
        assert ranks[0].hear() == "w1"
        ranks[1].kill()


def _wait_for(to: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return rpc.rpc_async(to, fn, args=args).wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_ends_a_wait(asynchronous: bool, tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        if rank == 1:
            time.sleep(100)
        call = _wait_for if asynchronous else rpc.rpc_sync
        with pytest.raises(KeyboardInterrupt):
            call("w1", time.sleep, args=(20,))
        say(time.monotonic())
        say(rpc.rpc_sync("w1", my_name))

    with ForkedRanks(2, story(2, tmp_path, act)) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(0.1)
        pressed = ranks[0].kill(signal.SIGINT)
        assert ranks[0].hear() - pressed < PROMPTLY
        assert ranks[0].hear() == "w1"
        ranks[1].kill()


def test_a_forked_child_is_no_worker(tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        say(fork_and_wait(lambda: int(rpc.is_initialized())))
        say(rpc.rpc_sync(1 - rank, my_name))
        rpc.barrier()

    with ForkedRanks(2, story(2, tmp_path, act)) as ranks:
        for number, rank in enumerate(ranks):
            assert rank.hear() == "ready"
            assert rank.hear() == 0
            assert rank.hear() == f"w{1 - number}"


def test_a_program_that_ends_without_shutdown_ends(tmp_path: Path) -> None:
    program = (
        "from tilework import rpc\n"
        f"options = rpc.RpcBackendOptions(init_method='file://{tmp_path}/meeting')\n"
        "rpc.init_rpc('w', rank=0, world_size=1, rpc_backend_options=options)\n"
        "print(rpc.rpc_sync('w', sum, args=([1, 2],)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
