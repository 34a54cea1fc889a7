"""Garbage written to a segment while ranks use it: an error or an end in time, never a crash."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import struct
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.csrc.core_ranks import NONCE, SLOT_BYTES, Rank
from tests.tables import each
from tilework import _core

RANKS = 3
#: After the segment's header and ranks' control pages: tables and cursors.
CONTROL_BYTES = 4096 * (1 + RANKS + 3)
TELLING = (0, 1, 2, 3, 64, 4096, 128 * 1024, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "barrier")
#: More memory than ranks need, and less than a wrong size would ask for.
SPARE_BYTES = 1 << 30
LIVES_SECONDS = 8.0


def play(rank: Rank, seed: int, until: float) -> None:
    """Random operations, each impatient, whatever comes of them."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        try:
            play_one(rank, draw)
        except _core.Fault:
            if draw.random() < 0.5:
                return


def play_one(rank: Rank, draw: random.Random) -> None:
    count = draw.choice([1, 700, 5000])
    tensors = [torch.zeros(count) for _ in range(RANKS)]
    kind = draw.choice([*KINDS, "send", "recv", "look"])
    peer = (rank.rank + draw.choice([1, 2])) % RANKS
    if kind == "send":
        rank.isend(peer, tensors[0], draw.randrange(2), timeout=0.05).wait(-1)
    elif kind == "recv":
        rank.irecv(draw.choice([peer, -1]), tensors[0], draw.randrange(2), timeout=0.05).wait(-1)
    elif kind == "look":
        look(rank.group)
    elif kind == "barrier":
        rank.run(kind, timeout=0.05)
    elif kind == "broadcast":
        rank.run(kind, [], tensors[:1], root=draw.randrange(RANKS), timeout=0.05)
    elif kind == "all_reduce":
        rank.submit(kind, tensors[:1], tensors[:1], op="sum", timeout=0.05).wait(-1)
    else:
        inputs = tensors if kind != "all_gather" else [torch.ones(count)]
        outputs = [torch.ones(count) for _ in range(1 if kind == "reduce_scatter" else RANKS)]
        op = "sum" if kind == "reduce_scatter" else "none"
        rank.run(kind, inputs, outputs, op=op, timeout=0.05)


def look(group: _core.Group) -> None:
    group.headers()
    group.aborted()
    group.failure_reports(0.0)
    group.statistics()


def scribble(memory: mmap.mmap, draw: random.Random, until: float) -> None:
    """Telling numbers over what ranks decide by; the first page names the group and stays."""
    while time.monotonic() < until:
        at = draw.randrange(512, CONTROL_BYTES // 8) * 8
        if draw.random() < 0.1:
            at = draw.randrange(16, 512) * 8  # the abort record
        number = draw.choice([*TELLING, draw.getrandbits(64)])
        memory[at : at + 8] = number.to_bytes(8, "little")
        time.sleep(draw.choice([0, 0, 1e-4]))


def live_through(seed: int) -> None:
    """In a child: three ranks, and somebody who scribbles."""
    fd = _core.create_segment(RANKS, SLOT_BYTES, NONCE)
    groups = [_core.Group(fd, rank, RANKS, NONCE) for rank in range(RANKS)]
    until = time.monotonic() + 0.15
    failures: list[str] = []

    def guarded(rank: int) -> None:
        try:
            play(Rank(groups[rank], rank, RANKS), seed * RANKS + rank, until)
        except BaseException:
            failures.append(traceback.format_exc())

    with mmap.mmap(fd, _core.segment_bytes(RANKS, SLOT_BYTES)) as memory:
        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        scribble(memory, random.Random(seed), until)
        for thread in threads:
            thread.join()
        for group in groups:
            group.close()
    assert not failures, "\n".join(failures)


def in_a_child(seed: int) -> str:
    """How a forked child got through it; "" is well."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: beside torch's threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
            live_through(seed)
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + LIVES_SECONDS
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = os.read(reader, 4096).decode(errors="replace")
    os.close(reader)
    if not ended:
        return f"it hung {said}"
    code = os.waitstatus_to_exitcode(status)
    return "" if code == 0 else f"it ended with {code}: {said}"


@each("part", range(4))
def test_ranks_get_through_garbage(part: int) -> None:
    for seed in range(part, 40, 4):
        assert in_a_child(seed) == "", f"seed {seed}"


@contextlib.contextmanager
def open_segment() -> Iterator[tuple[list[Rank], mmap.mmap]]:
    """Two ranks, and the memory that they share."""
    fd = _core.create_segment(2, SLOT_BYTES, NONCE)
    ends = [_core.Group(fd, rank, 2, NONCE) for rank in range(2)]
    with mmap.mmap(fd, _core.segment_bytes(2, SLOT_BYTES)) as memory:
        os.close(fd)
        yield [Rank(end, rank, 2) for rank, end in enumerate(ends)], memory
    for end in ends:
        end.close()


def places_of(memory: mmap.mmap, pattern: bytes, count: int) -> list[int]:
    """Where a pattern stands, once it stands so often."""
    deadline, places = time.monotonic() + 20, list[int]()
    while len(places) < count:
        assert time.monotonic() < deadline
        places, at = [], memory.find(pattern)
        while at >= 0:
            places.append(at)
            at = memory.find(pattern, at + 1)
    return places


def test_a_fragment_longer_than_what_is_left_of_its_message_is_refused() -> None:
    tag, count = 0x1234567890ABCDE, 33 * 256  # 33 KiB: a fragment of 32 KiB, and one of 1 KiB
    with open_segment() as (ranks, memory):
        for _ in range(2):
            ranks[0].isend(1, torch.ones(count), tag)
        second, _ = places_of(memory, struct.pack("=IIq", 1024, 0, tag), 2)
        memory[second : second + 4] = struct.pack("=I", 16 * 1024)
        room = torch.zeros(count + 8192)
        with pytest.raises(_core.Fault):
            ranks[1].irecv(0, room[:count], tag).wait(-1)
        assert not room[count:].any()


def test_a_buffer_that_goes_beyond_its_arena_is_refused() -> None:
    with open_segment() as (ranks, memory):
        arena = ranks[1].group.arena()
        first, size = arena.allocate(64 * 0x1234), 16 * 1024
        address = arena.allocate(size)
        arguments = (_core.KINDS["broadcast"], _core.DTYPES["float32"], _core.REDUCE_OPS["none"])
        ranks[1].group.submit(*arguments, 1, 1.0, [], [(address, size)], 5, 20.0)
        (place,) = places_of(memory, (1 + address - first).to_bytes(8, "little"), 1)
        arena_bytes = int.from_bytes(memory[24:32], "little")  # of its identity
        memory[place : place + 8] = (1 + arena_bytes - size + 64).to_bytes(8, "little")
        with pytest.raises(_core.Fault, match="beyond the arena"):
            ranks[0].run("broadcast", [], [torch.zeros(size // 4)], root=1)
