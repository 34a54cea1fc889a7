"""Operations that go on while their callers do something else, or wait: short ones above all."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.comm.backends.shm.shm_group import PostedWork
from tilework.testing import run_ranks

#: True: the core reads tensors, and short operations are posted; older torch has no table for it.
POSTS = hasattr(Tensor, "__dlpack_c_exchange_api__")


def run(program: Callable[[int], object], ranks: int = 2) -> list[object]:
    return run_ranks(ranks, program, kind="processes")


def becomes(tensor: Tensor, value: float) -> bool:
    """True as soon as the tensor has the value, without any call of the group's."""
    until = time.monotonic() + 60
    while tensor[0].item() != value and time.monotonic() < until:
        time.sleep(0.001)
    return tensor[0].item() == value


def test_a_short_collective_ends_though_nobody_waits() -> None:
    def program(rank: int) -> bool:
        x = torch.full((2,), rank + 1.0)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            return isinstance(work, PostedWork) == POSTS and becomes(x, 3.0)
        dist.all_reduce(x)
        return bool(x[0] == 3.0)

    assert run(program) == [True, True]


@pytest.mark.parametrize("source", [1, None], ids=["one", "any"])
def test_a_short_receive_ends_though_nobody_waits(source: int | None) -> None:
    def program(rank: int) -> bool:
        x = torch.full((2,), 5.0)
        if rank == 1:
            dist.barrier()
            dist.send(x, 0)
            return True
        x.zero_()
        work = dist.irecv(x, source)
        assert work is not None
        dist.barrier()
        return isinstance(work, PostedWork) == POSTS and becomes(x, 5.0) and work.source_rank() == 1

    assert run(program) == [True, True]


def test_what_waits_for_room_is_sent_though_nobody_waits() -> None:
    """More short messages than the channel takes, of which each is a Work that is dropped."""
    count = 3000

    def program(rank: int) -> list[float]:
        store = dist.get_default_store()
        if rank == 0:
            for number in range(count):
                dist.isend(torch.full((128,), float(number)), 1)
            gc.collect()
            store.get("heard")  # without a call of the group's
            return []
        x = torch.zeros(128)
        heard = []
        for _ in range(count):
            dist.recv(x, 0)
            heard.append(x[-1].item())
        store.set("heard", "all")
        return heard

    assert run(program)[1] == [float(number) for number in range(count)]


def test_asking_until_it_is_done_is_enough() -> None:
    def program(rank: int) -> list[float]:
        x, y = torch.full((2,), rank + 1.0), torch.zeros(2)
        works = [dist.irecv(y, 1 - rank), dist.all_reduce(x, async_op=True)]
        dist.send(torch.full((2,), rank + 7.0), 1 - rank)
        for work in works:
            assert work is not None
            while not work.is_completed():
                pass
        return [x[0].item(), y[0].item()]

    assert run(program) == [[3.0, 8.0], [3.0, 7.0]]


def test_a_future_needs_nobody_who_waits() -> None:
    def program(rank: int) -> float:
        x = torch.full((2,), rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        return float(work.get_future().then(lambda done: done.value()[0][0].item()).wait())

    assert run(program) == [3.0, 3.0]


def test_operations_keep_their_order() -> None:
    """Asynchronous and blocking ones, short and long."""

    def program(rank: int) -> list[float]:
        x = torch.ones(2)
        y = torch.ones(1 << 20)
        works = []
        for _ in range(20):
            works.append(dist.all_reduce(x, async_op=True))
            works.append(dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True))
            dist.all_reduce(x)
        for work in works:
            assert work is not None
            work.wait()
        return [x[0].item(), y[-1].item()]

    assert run(program) == [[2.0**40, 1.0]] * 2


def test_coalesced_operations_take_the_fast_path() -> None:
    def program(rank: int) -> tuple[bool, list[float]]:
        tensors = [torch.full((2,), float(rank + i)) for i in range(4)]
        with dist.coalescing_manager(async_ops=True) as block:
            for tensor in tensors:
                assert dist.all_reduce(tensor) is None
        posted = all(isinstance(work, PostedWork) == POSTS for work in block.works)
        block.wait()
        return posted and len(block.works) == 4, [tensor[0].item() for tensor in tensors]

    assert run(program) == [(True, [1.0, 3.0, 5.0, 7.0])] * 2


def test_a_failure_names_the_call() -> None:
    """Long after it, and after the tensor was resized."""

    def program(rank: int) -> str:
        if rank == 1:
            return ""
        x = torch.zeros(3)
        work = dist.irecv(x, 1, tag=9)
        x.resize_(5)
        assert work is not None
        try:
            work.wait()
        except dist.PeerLostError as error:
            return str(error)
        return "nothing"

    text = str(run(program)[0])
    assert "recv float32 [3] from rank 1 tag 9" in text
    assert f"{os.path.basename(__file__)}:" in text
    assert "in program" in text


def test_the_version_is_raised_once_it_is_done() -> None:
    def program(rank: int) -> bool:
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        z = y * y
        with torch.no_grad():
            work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        try:
            z.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    assert run(program) == [True, True]


def test_who_waits_does_short_operations_itself() -> None:
    """No thread of the core is woken for each: the two that look by themselves suffice."""
    calls = 1000
    shortest = 50e-6  # between looks, csrc/transport/wake_up.h

    def switches() -> int:
        """Context switches of this process's other threads that waited for something."""
        total = 0
        for status in Path("/proc/self/task").glob("*/status"):
            if int(status.parent.name) != os.getpid():
                line = next(li for li in status.read_text().splitlines() if "voluntary" in li)
                total += int(line.split()[1])
        return total

    def program(rank: int) -> float:
        x, y = torch.zeros(2), torch.zeros(2)
        fewest = float("inf")
        for _ in range(5):
            dist.barrier()
            before, start = switches(), time.perf_counter()
            for _ in range(calls):
                work = dist.all_reduce(x, async_op=True)
                message = dist.irecv(y, 1 - rank)
                assert work is not None
                assert message is not None
                work.wait()
                dist.isend(x, 1 - rank)
                message.wait()
            looks = 2 * (time.perf_counter() - start) / shortest
            fewest = min(fewest, switches() - before - looks)
        return fewest

    for woken in run(program):
        assert isinstance(woken, float)
        assert woken < calls / 2


def test_a_forked_child_cannot_wait() -> None:
    def program(rank: int) -> tuple[int, float]:
        x = torch.zeros(2)
        work = dist.irecv(x, 1 - rank)
        assert work is not None
        child = os.fork()
        if child == 0:
            try:
                work.wait()
            except dist.DistBackendError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.isend(torch.full((2,), rank + 1.0), 1 - rank)
        work.wait()
        return status, x[0].item()

    assert run(program) == [(7, 2.0), (7, 1.0)]
