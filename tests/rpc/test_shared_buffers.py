"""Memory files: written again only when nobody reads them, and let go of."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from tests.faults.forked_ranks import Holdings
from tests.rpc.joined_ranks import fork_and_wait, identity, only, this_agent, together, until
from tilework import rpc
from tilework.memory_files import MemoryFile
from tilework.rpc import shared_buffers
from tilework.rpc.shared_buffers import LEAST_BYTES, MappedBuffers, SharedBufferPool

SIZE = 2 * LEAST_BYTES


def shared(pool: SharedBufferPool, value: int, size: int = SIZE) -> tuple[int, bool]:
    found = pool.share(1, [memoryview(bytes([value]) * size)], [0])
    assert found is not None
    return found


class Pair:
    """A pool, and the mappings of its files, in one process."""

    def __init__(self) -> None:
        self.pool, self.mapped = SharedBufferPool(), MappedBuffers(lambda: None)

    def map(self, value: int) -> Any:
        fd, returning = shared(self.pool, value)
        found = self.mapped.map(0, os.getpid(), fd, SIZE, returning)
        if not returning:
            self.pool.taken(fd)
        return found

    def give_back(self) -> list[bool]:
        agains = []
        for _, fd, again in self.mapped.released():
            (self.pool.returned if again else self.pool.taken)(fd)
            agains.append(again)
        return agains


def test_a_file_is_used_again_when_it_was_given_back() -> None:
    pair = Pair()
    first = pair.map(1)
    second = pair.map(2)
    files = Holdings.now().descriptors
    del second
    assert pair.give_back() == [True]
    third = pair.map(3)
    assert Holdings.now().descriptors == files
    assert (first[0], third[0], third[-1]) == (1, 3, 3)
    pair.pool.close()


def test_what_the_receiver_writes_stays_its_own() -> None:
    pair = Pair()
    first = pair.map(1)
    first[:4] = b"mine"
    del first
    pair.give_back()
    assert pair.map(2)[:4] == b"\2\2\2\2"
    pair.pool.close()


def test_a_tensor_keeps_its_file_from_being_written() -> None:
    pair = Pair()
    tensor = torch.frombuffer(memoryview(pair.map(1))[64:128], dtype=torch.uint8)
    assert not pair.give_back()
    assert pair.map(2)[70] == 2
    assert tensor.tolist() == [1] * 64
    del tensor
    assert True in pair.give_back()
    pair.pool.close()


def test_a_file_that_a_forked_child_has_is_not_written_again() -> None:
    pair = Pair()
    before = pair.map(1)
    fork_and_wait(lambda: 0)
    after = pair.map(2)
    del before, after
    assert sorted(pair.give_back()) == [False, True]
    pair.pool.close()


def test_there_is_a_limit_to_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffers, "_MOST_FILES", 3)
    pair = Pair()
    files = Holdings.now().descriptors
    held = [pair.map(n) for n in range(10)]
    assert Holdings.now().descriptors <= files + 10 + 3  # each mapping has one of its own
    assert [found[0] for found in held] == list(range(10))
    del held
    assert pair.give_back() == [True] * 3
    monkeypatch.setattr(shared_buffers, "_MOST_BYTES", SIZE)
    assert shared(pair.pool, 1, SIZE + 1)[1] is False  # too large to be kept
    pair.pool.close()


def test_unused_files_are_let_go_of_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffers, "_KEPT_SECONDS", 0.05)

    def act() -> None:
        rpc.rpc_sync("w1", identity, args=(1,))
        before = Holdings.now()
        for _ in range(5):
            rpc.rpc_sync("w1", identity, args=(torch.ones(SIZE),))
        gc.collect()
        until(lambda: Holdings.now().descriptors <= before.descriptors)

    together(2, only(0, act))


def test_tensors_that_are_kept_stay_what_they_were() -> None:
    def program(rank: int) -> bool:
        kept = []
        for n in range(60):
            got = rpc.rpc_sync(1 - rank, identity, args=(torch.full((SIZE,), 100 * rank + n),))
            if n % 3 == 0:
                kept.append((n, got))
        return all(bool((got == 100 * rank + n).all()) for n, got in kept)

    assert together(2, program) == [True, True]


def test_who_cannot_open_the_file_gets_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "is_reachable", lambda self: False)

    def act() -> Any:
        for _ in range(2):
            rpc.rpc_sync("w1", identity, args=(torch.ones(SIZE),))
        return this_agent().sender.readers, float(
            rpc.rpc_sync("w1", torch.sum, args=(torch.ones(SIZE),))
        )

    assert together(2, only(0, act))[0] == (set(), float(SIZE))


def test_a_file_that_vanished_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> Any:
        rpc.rpc_sync("w1", identity, args=(1,))
        until(lambda: 1 in this_agent().sender.readers)
        with monkeypatch.context() as patch:
            patch.setattr(MappedBuffers, "map", _cannot)
            with pytest.raises(RuntimeError, match="cannot open the sender's memory"):
                rpc.rpc_sync("w1", identity, args=(torch.ones(SIZE),))
        return rpc.rpc_sync("w1", identity, args=(2,))

    assert together(2, only(0, act))[0] == 2


def _cannot(*_: Any) -> Any:
    raise OSError("too many open files")
