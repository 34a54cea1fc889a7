"""Segments: what is accepted, what they cost, and that garbage in them harms nobody."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from tests.csrc.core_ranks import NONCE, SLOT_BYTES, Rank, run_threads
from tests.tables import each
from tilework import _core

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@contextmanager
def segment(size: int = 2, slot_bytes: int = SLOT_BYTES) -> Iterator[int]:
    fd = _core.create_segment(size, slot_bytes, NONCE)
    yield fd
    os.close(fd)


def test_a_segment_is_sealed_and_not_inherited() -> None:
    with segment() as fd:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        assert not os.get_inheritable(fd)
        status = os.fstat(fd)
        assert status.st_size >= _core.segment_bytes(2, SLOT_BYTES)  # the rest is room for arenas
        assert status.st_blocks * 512 <= 4096  # which costs nothing


def test_a_large_group_costs_little_until_it_is_used() -> None:
    with segment(64, _core.DEFAULT_SLOT_BYTES) as fd:
        groups = [_core.Group(fd, rank, 64, NONCE) for rank in range(64)]
        assert os.fstat(fd).st_blocks * 512 < 1 << 20
        for group in groups:
            group.close()


def stated_bound(ranks: int, pairs: int = 0) -> int:
    """The bytes that a group holds at most, says docs/algorithms/shared-memory.md."""
    outboxes, control, page = 2 * _core.DEFAULT_SLOT_BYTES, 4096, 4096
    ring = max(128 * 1024, 2 * outboxes // ranks)
    tables = ranks * 2 * 2 * ranks * 8 + ranks * ranks * 128
    return ranks * (outboxes + control) + tables + pairs * ring + 4 * page


@each("ranks", [2, 3, 4, 8, 16, 32, 64])
def test_the_segment_is_as_long_as_is_stated(ranks: int) -> None:
    length = _core.segment_bytes(ranks, _core.DEFAULT_SLOT_BYTES)
    assert length <= stated_bound(ranks, pairs=ranks * ranks)


@each("ranks", [2, 8, 64])
def test_memory_of_a_group_is_bounded(ranks: int) -> None:
    """That holds however long the tensors, and after every kind of collective."""

    def program(rank: Rank) -> None:
        full = torch.zeros(_core.DEFAULT_SLOT_BYTES // 4 + 1000)
        part = torch.zeros(1000)
        own = [torch.zeros(1000) for _ in range(ranks)]
        parts = [torch.zeros(1000) for _ in range(ranks)]
        rank.run("all_reduce", [full], [full], op="sum")
        rank.run("broadcast", [], [full])
        rank.run("all_gather", [part], parts)
        rank.run("all_to_all", own, parts)
        rank.run("reduce_scatter", own, [part], op="sum")
        rank.run("barrier")

    with segment(ranks, _core.DEFAULT_SLOT_BYTES) as fd:
        ends = [_core.Group(fd, rank, ranks, NONCE) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            runs = [pool.submit(program, Rank(end, i, ranks)) for i, end in enumerate(ends)]
        for run in runs:
            run.result()
        assert 0 < os.fstat(fd).st_blocks * 512 <= stated_bound(ranks)
        for end in ends:
            end.close()


def test_rounds_use_all_of_an_outbox() -> None:
    """A rank writes where its peers, whose caches keep what they read of late, read longest ago."""
    short = torch.zeros(8 * 1024)
    rounds = 2 * _core.DEFAULT_SLOT_BYTES // short.nbytes

    def program(rank: Rank) -> None:
        for _ in range(rounds):
            rank.run("broadcast", [], [short.clone()])

    with segment(2, _core.DEFAULT_SLOT_BYTES) as fd:
        ends = [_core.Group(fd, rank, 2, NONCE) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(program, Rank(end, i, 2)) for i, end in enumerate(ends)]
        for run in runs:
            run.result()
        assert os.fstat(fd).st_blocks * 512 >= 2 * _core.DEFAULT_SLOT_BYTES
        for end in ends:
            end.close()


@each(
    ("rank", "size", "nonce", "said"),
    [
        (0, 3, NONCE, "for 2 ranks, not 3"),
        (2, 2, NONCE, "0 to size - 1"),
        (-1, 2, NONCE, "0 to size - 1"),
        (0, 2, b"another", "another group"),
        (0, 2, b"n" * 100, "at most 64"),
    ],
)
def test_who_does_not_belong_is_refused(rank: int, size: int, nonce: bytes, said: str) -> None:
    with segment() as fd, pytest.raises(ValueError, match=said):
        _core.Group(fd, rank, size, nonce)


def test_a_rank_can_be_taken_once() -> None:
    with segment() as fd:
        group = _core.Group(fd, 0, 2, NONCE)
        with pytest.raises(ValueError, match=f"rank 0 is already taken, by process {os.getpid()}"):
            _core.Group(fd, 0, 2, NONCE)
        group.close()


@each("size", [0, -1, 5000])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        _core.create_segment(size, SLOT_BYTES, NONCE)


@each("slot_bytes", [0, 100, 4097, 1 << 31])
def test_impossible_slots(slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slot_bytes"):
        _core.create_segment(2, slot_bytes, NONCE)


def test_an_unsealed_or_foreign_file_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _core.segment_bytes(2, SLOT_BYTES))
    with pytest.raises(ValueError, match="not a sealed memfd"):
        _core.Group(fd, 0, 2, NONCE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(ValueError, match="wrong magic"):
        _core.Group(fd, 0, 2, NONCE)
    os.close(fd)


def test_another_abi_or_length_is_refused() -> None:
    with segment() as fd:
        os.pwrite(fd, (_core.ABI + 1).to_bytes(4, "little"), 8)
        with pytest.raises(ValueError, match="must run the same tilework"):
            _core.Group(fd, 0, 2, NONCE)
        os.pwrite(fd, _core.ABI.to_bytes(4, "little"), 8)
        os.pwrite(fd, (2 * SLOT_BYTES).to_bytes(8, "little"), 16)
        with pytest.raises(ValueError, match="wrong length"):
            _core.Group(fd, 0, 2, NONCE)


def scribble(fd: int, draw: random.Random) -> None:
    """Garbage over everything but what a rank checked when it joined, dense and sparse."""
    with mmap.mmap(fd, _core.segment_bytes(2, SLOT_BYTES)) as memory:
        if draw.random() < 0.5:
            memory[4096:] = draw.randbytes(len(memory) - 4096)
        else:
            for _ in range(2000):
                at = draw.randrange(512, len(memory) // 8) * 8
                memory[at : at + 8] = draw.choice(
                    [b"\xff" * 8, (1).to_bytes(8, "little"), draw.randbytes(8), b"\0" * 7 + b"\x7f"]
                )


def attempt(rank: Rank, kind: str) -> None:
    tensor, parts = torch.zeros(3000), [torch.zeros(10), torch.zeros(2000)]
    if kind == "recv":
        rank.irecv(1, tensor, timeout=0.05).wait(-1)
    elif kind == "all_gather":
        rank.run(kind, [parts[0]], parts, timeout=0.05)
    elif kind == "all_reduce":
        rank.run(kind, [tensor], [tensor], op="sum", timeout=0.05)
    else:
        rank.run(kind, [], [tensor], root=1, timeout=0.05)


@each("kind", ["all_reduce", "all_gather", "broadcast", "recv"])
@each("seed", range(4))
def test_garbage_never_crashes_a_reader(seed: int, kind: str) -> None:
    with segment() as fd:
        group = _core.Group(fd, 0, 2, NONCE)
        scribble(fd, random.Random(seed))
        assert len(group.headers()) == len(group.failure_reports(0.0)) == 2
        group.aborted()
        with suppress(_core.Fault):
            attempt(Rank(group, 0, 2), kind)
        group.close()


@each("limit", [0, 1, 5000])
def test_a_group_counts_the_cores_that_its_control_group_grants(limit: int) -> None:
    def program(rank: Rank) -> int:
        rank.run("barrier")
        return rank.group.cores()

    usable = len(os.sched_getaffinity(0))
    try:
        _core.set_core_limit(limit)
        cores = run_threads(3, program)
    finally:
        _core.set_core_limit(0)
    assert cores == [min(usable, limit or usable)] * 3
