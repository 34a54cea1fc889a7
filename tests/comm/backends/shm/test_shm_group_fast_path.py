"""The fast path of shm groups (csrc/python/fast_path.h) does what the group's methods do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
needs_exchange_table = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table by which the core reads tensors",
)


def on_shm(size: int, program: Callable[[int], Any]) -> list[Any]:
    return run_ranks(size, program, kind="threads", backend="shm", timeout=LIMIT)


def strided(tensor: Tensor) -> Tensor:
    """The same values with a gap after each: too much for the fast path of reductions."""
    return torch.stack([tensor, tensor], -1)[..., 0]


class Watched(Tensor):
    """A subclass: not for the fast path."""


class Counted:
    """A group's fast path, with the number of operations that it took and refused."""

    def __init__(self, fast_path: Any) -> None:
        self.fast_path = fast_path
        self.taken = self.refused = 0

    def run(self, *args: Any) -> bool:
        done = bool(self.fast_path.run(*args))
        self.taken += done
        self.refused += not done
        return done


@settings(max_examples=40, deadline=None)
@given(
    long_ranks=st.integers(0, 3),
    shape=st.sampled_from([(), (0,), (7,), (4, 6), (2, 1, 3)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.bool]),
)
def test_ranks_may_take_different_ways(
    long_ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """``long_ranks`` says for each rank, as a bit, whether its tensors are strided."""

    def program(rank: int, mask: int) -> list[Tensor]:
        take = strided if mask >> rank & 1 else torch.Tensor.contiguous
        counted = Counted(dist.get_default_group().fast_path)
        dist.get_default_group().fast_path = counted  # type: ignore[assignment]
        count = torch.Size(shape).numel()
        x = take((torch.arange(count) % 3 + rank).to(dtype).reshape(shape))
        both, swapped = (take(torch.zeros(2, *shape, dtype=dtype)) for _ in range(2))
        first, second, reduced = (take(torch.zeros(shape, dtype=dtype)) for _ in range(3))
        dist.all_gather_into_tensor(both, x)
        dist.all_gather([first, second], x)
        dist.reduce_scatter_tensor(reduced, both)
        dist.all_reduce(x)
        dist.all_to_all_single(swapped, both)
        dist.broadcast(reduced, 1)
        assert counted.taken + counted.refused == 6
        return [tensor.clone() for tensor in (both, first, second, x, swapped, reduced)]

    found = on_shm(2, lambda rank: program(rank, long_ranks))
    truth = on_shm(2, lambda rank: program(rank, 3))
    for mine, expected in zip(found, truth, strict=True):
        for a, b in zip(mine, expected, strict=True):
            assert torch.equal(a, b)


@needs_exchange_table
def test_dense_tensors_take_it_and_others_do_not() -> None:
    def program(rank: int) -> list[tuple[int, int]]:
        pg = dist.get_default_group()
        figures = []
        for tensor in (
            torch.ones(3),
            torch.nn.Parameter(torch.ones(3)),
            strided(torch.ones(3)),
            torch.ones(3).as_subclass(Watched),
            torch.ones(3, dtype=torch.complex64),
            torch._neg_view(torch.ones(3)),
        ):
            counted = Counted(pg.fast_path)
            pg.fast_path, fast_path = counted, pg.fast_path  # type: ignore[assignment]
            dist.all_reduce(tensor)
            pg.fast_path = fast_path
            assert tensor.tolist() == ([-2] * 3 if tensor.is_neg() else [2] * 3)
            figures.append((counted.taken, counted.refused))
        return figures

    taken, refused = (1, 0), (0, 1)
    assert on_shm(2, program) == [[taken, taken, *[refused] * 4]] * 2


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The shape of a tensor, and a block of it whose memory is in rows at one distance."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    cut = draw(st.integers(0, len(shape) - 1))
    begin = draw(st.integers(0, shape[cut] - 1))
    end = draw(st.integers(begin + 1, shape[cut]))
    return shape, (*[slice(None)] * cut, slice(begin, end))


@needs_exchange_table
@settings(max_examples=60, deadline=None)
@given(
    block=blocks(),
    scale=st.sampled_from([1, 700]),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.int64]),
    root=st.integers(0, 2),
)
def test_what_only_moves_may_be_in_rows(
    block: tuple[tuple[int, ...], tuple[slice, ...]], scale: int, dtype: torch.dtype, root: int
) -> None:
    shape, where = block
    shape = (*shape[:-1], shape[-1] * scale)
    if len(where) == len(shape):
        where = (*where[:-1], slice(where[-1].start * scale, where[-1].stop * scale))

    def within(value: int) -> tuple[Tensor, Tensor]:
        whole = torch.full(shape, 99, dtype=dtype)
        inner = whole[where]
        inner.copy_((torch.arange(inner.numel()) % 100 + value).to(dtype).reshape(inner.shape))
        return whole, inner

    def program(rank: int) -> None:
        pg = dist.get_default_group()
        assert pg.takes_rows
        counted = Counted(pg.fast_path)
        pg.fast_path = counted  # type: ignore[assignment]
        _, mine = within(rank)
        parts = [within(10 * rank + peer)[1] for peer in range(3)]
        wholes, blank = zip(*[within(0) for _ in range(12)], strict=True)
        dist.all_gather(list(blank[:3]), mine)
        dist.gather(mine, list(blank[3:6]) if rank == root else None, dst=root)
        dist.scatter(blank[6], parts if rank == root else None, src=root)
        dist.all_to_all(list(blank[7:10]), parts)
        dist.broadcast(mine, root)
        assert (counted.taken, counted.refused) == (5, 0)
        for peer in range(3):
            assert torch.equal(blank[peer], within(peer)[1])
            assert torch.equal(blank[3 + peer], within(peer if rank == root else 0)[1])
            assert torch.equal(blank[7 + peer], within(10 * peer + rank)[1])
        assert torch.equal(blank[6], within(10 * root + rank)[1])
        assert torch.equal(mine, within(root)[1])
        for whole in wholes:  # and nothing around the blocks is written
            whole[where] = 99
            assert (whole == 99).all()

    on_shm(3, program)


@needs_exchange_table
def test_rows_within_each_other() -> None:
    def program(rank: int) -> tuple[int, int]:
        pg = dist.get_default_group()
        counted = Counted(pg.fast_path)
        pg.fast_path = counted  # type: ignore[assignment]
        square, mine = torch.zeros(4, 4), torch.full((4, 2), 1.0 + rank)
        dist.all_gather([square[:, :2], square[:, 2:]], mine)
        assert square.tolist() == [[1, 1, 2, 2]] * 4
        # A row of one output between those of the other; each rank's own part is the large one.
        outputs, inputs = [square[:, :2], square[1, 2:]], [mine, torch.full((2,), 5.0 + rank)]
        order = slice(None, None, -1 if rank else None)
        dist.all_to_all(outputs[order], inputs[order])
        row = [1.0 + rank] * 2
        assert square.tolist() == [row + ([6.0 - rank] * 2 if i == 1 else [2, 2]) for i in range(4)]
        return counted.taken, counted.refused

    def shared(rank: int) -> tuple[int, int]:
        pg = dist.get_default_group()
        counted = Counted(pg.fast_path)
        pg.fast_path = counted  # type: ignore[assignment]
        square = torch.zeros(4, 4)
        dist.all_gather([square[:, :3], square[:, 1:]], torch.ones(4, 3))
        return counted.taken, counted.refused

    assert on_shm(2, program) == [(2, 0)] * 2
    assert on_shm(2, shared) == [(0, 1)] * 2


def test_what_it_writes_looks_written_to_autograd() -> None:
    def program(rank: int) -> None:
        weight = torch.ones(2, requires_grad=True)
        saved = weight * 1
        loss = (saved * saved).sum()
        with torch.no_grad():
            dist.all_reduce(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2]

    on_shm(2, program)


def test_uneven_rows() -> None:
    def program(rank: int) -> list[float]:
        sent, received = ([1, 3], [1, 0]) if rank == 0 else ([0, 2], [3, 2])
        source = torch.arange(float(sum(sent))) + 10 * rank
        target = torch.zeros(sum(received))
        dist.all_to_all_single(target, source, received, sent)
        return target.tolist()

    assert on_shm(2, program) == [[0], [1, 2, 3, 10, 11]]


def test_the_flight_record_tells_both_ways_alike() -> None:
    def program(rank: int) -> list[tuple[int, str, str, str]]:
        pg = dist.get_default_group()
        here = inspect.currentframe()
        assert here is not None
        for take in (torch.Tensor.contiguous, strided):
            x, both = take(torch.ones(3)), take(torch.ones(2, 3))
            dist.all_reduce(x)
            dist.all_gather_into_tensor(both, x)
            dist.broadcast(x, 1)
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank, tag=4)
        entries = pg.flight_entries()
        assert all(e.ended is not None and e.ended >= e.entered > 1e9 for e in entries)
        assert {e.site.rpartition(":")[0] for e in entries} == {__file__}
        assert {e.site.rpartition(" in ")[2] for e in entries} == {"program"}
        assert [e.peer for e in entries] == [None, None, None, 1 - rank] * 2
        return [(e.number, e.what, str(e.tag), e.outcome) for e in entries]

    for told in on_shm(2, program):
        assert [number for number, *_ in told] == [1, 2, 3, 0, 4, 5, 6, 0]
        assert [rest for _, *rest in told[:4]] == [rest for _, *rest in told[4:]]


def test_the_flight_record_names_the_line_in_frames_of_each_kind() -> None:
    def program(rank: int) -> list[str]:
        def generator() -> Iterator[object]:
            yield dist.barrier()
            yield dist.barrier()

        async def coroutine() -> None:
            dist.barrier()

        assert len(list(generator())) == 2
        with contextlib.suppress(StopIteration):
            coroutine().send(None)
        sorted([rank], key=lambda _: dist.barrier() is None)
        functools.partial(dist.barrier)()
        exec(compile("\n\ndist.barrier()", "typed", "exec"), {"dist": dist})
        start = program.__code__.co_firstlineno
        sites = [
            e.site.rpartition(":")[2].split(" in ")
            for e in dist.get_default_group().flight_entries()
        ]
        return [
            f"{int(line) - (start if name != '<module>' else 0)} {name}" for line, name in sites
        ]

    expected = [
        "2 generator",
        "3 generator",
        "6 coroutine",
        "11 <lambda>",
        "12 program",
        "3 <module>",
    ]
    assert on_shm(2, program) == [expected] * 2


def test_an_interrupted_recv_ends_the_group() -> None:
    def program(rank: int) -> str:
        if rank == 0:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(InterruptedError):
                dist.recv(torch.ones(1), 1)
            return "interrupted"
        with pytest.raises(dist.PeerLostError, match="InterruptedError in recv"):
            dist.all_reduce(torch.ones(1))
        return "told"

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError(f"signal {number} in {os.getpid()}")

    outcomes = run_ranks(2, program, kind="processes", backend="shm", timeout=LIMIT)
    assert outcomes == ["interrupted", "told"]


def test_threads_of_one_rank_may_call_at_once() -> None:
    def program(rank: int) -> list[float]:
        groups = [dist.new_group() for _ in range(4)]
        tensors = [torch.full((1000,), 1.0) for _ in groups]

        def work(tensor: Tensor, group: Any) -> None:
            for _ in range(50):
                dist.all_reduce(tensor.fill_(1.0), group=group)

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(tensors, groups, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [tensor[0].item() for tensor in tensors]

    outcomes = run_ranks(2, program, kind="processes", backend="shm", timeout=LIMIT)
    assert outcomes == [[2.0] * 4] * 2


def test_streams_of_short_messages() -> None:
    """Messages, one or many under way, shorter and longer than those beside the head."""
    sizes = [2, 0, 4, 5, 1, 40, 3, 2, 4] * 20

    def program(rank: int) -> bool:
        dist.barrier()
        for turn, size in enumerate(sizes):
            message = torch.arange(size, dtype=torch.float32) + turn
            if rank == 0:
                dist.send(message, 1, tag=turn % 2)
                continue
            received = torch.full((size,), -1.0)
            before = received._version
            assert dist.recv(received, 0, tag=turn % 2) == 0
            assert torch.equal(received, message)
            assert received._version == before + 1
        dist.barrier()
        return True

    assert on_shm(2, program) == [True, True]


def test_times_in_the_flight_record_are_those_of_the_clock() -> None:
    def program(rank: int) -> None:
        before = time.time()
        dist.all_reduce(torch.ones(2))
        after = time.time()
        entry = dist.get_default_group().flight_entries()[-1]
        assert entry.ended is not None
        # A second, where somebody sets the clock meanwhile.
        assert before - 1 <= entry.entered <= entry.ended <= after + 1

    on_shm(2, program)
