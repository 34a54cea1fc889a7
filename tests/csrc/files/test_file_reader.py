"""The core's reading of parts of files, against slices."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework import _core
from tilework.checkpoint.tensor_bytes import Runs, no_runs, runs_of
from tilework.layout import Box

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def sums(data: bytes, chunk: int) -> bytes:
    return b"".join(
        zlib.crc32(data[at : at + chunk]).to_bytes(4, "little") for at in range(0, len(data), chunk)
    )


def whole(memory: torch.Tensor) -> Runs:
    return memory.data_ptr(), 0, memory.nbytes, [], [], []


def read(
    file: int,
    data: bytes,
    runs: Runs,
    *,
    offset: int = 0,
    chunk: int = MIB,
    checked: bytes | None = None,
) -> tuple[int, int | None] | None:
    chunks = -(-len(data) // chunk)
    flags = b"\1" * chunks if checked is None else checked
    one = (file, offset, len(data), runs, 0, len(data), sums(data, chunk), flags)
    wrong = _core.FileReader().read([one], chunk)
    if wrong is None:
        return None
    assert wrong[0] == 0
    if wrong[3]:
        raise OSError(wrong[3], os.strerror(wrong[3]))
    return wrong[1:3]


def read_shares(
    file: int, offset: int, nbytes: int, chunk: int, runs: Runs
) -> tuple[bytes, tuple[int, int, int | None, int] | None]:
    """The shares of what is wanted in the checksums of all chunks, and what is wrong."""
    shares = bytearray(4 * -(-nbytes // chunk))
    address = ctypes.addressof(ctypes.c_char.from_buffer(shares))
    one = (file, offset, nbytes, runs, 0, nbytes, 0)
    wrong = _core.FileReader().read_shares([one], chunk, address, len(shares) // 4)
    return bytes(shares), wrong


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_box_comes_to_its_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple))
    shape = (*shape, data.draw(st.sampled_from([32, 200, 900])))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    saved = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    content, offset = (
        bytes(saved.view(-1).view(torch.uint8).numpy()),
        data.draw(st.integers(0, 5000)),
    )
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(b"-" * offset + content + b"-")
    chunk = data.draw(st.sampled_from([16, 4096, 1 << 16, MIB])) if len(content) < MIB else MIB
    room = torch.full([size + 3 for size in shape], -1, dtype=torch.int32)
    slices = tuple(slice(a, b) for a, b in box)
    target = room[tuple(slice(1, 1 + b - a) for a, b in box)]
    part = Box((0,) * len(shape), shape)
    runs = runs_of(part, Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)), target)
    checked = bytes(
        data.draw(st.lists(st.booleans(), min_size=(n := -(-len(content) // chunk)), max_size=n))
        if len(content) < 64 * chunk
        else [1] * (-(-len(content) // chunk))
    )
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if runs is None:  # too short
            assert (box[-1][1] - box[-1][0]) * 4 < 64
            return
        assert read(descriptor, content, runs, offset=offset, chunk=chunk, checked=checked) is None
    finally:
        os.close(descriptor)
    expected = torch.full_like(room, -1)
    expected[tuple(slice(1, 1 + b - a) for a, b in box)] = saved[slices]
    assert room.equal(expected)


@pytest.mark.parametrize("nbytes", [1, 4095, 4097, MIB, 3 * MIB + 77, 21 * MIB + 5])
def test_lengths(file: int, nbytes: int) -> None:
    data = os.urandom(nbytes)
    os.write(file, data)
    memory = torch.zeros(nbytes + 1, dtype=torch.uint8)
    for shift in (0, 1):  # of another alignment
        target = memory[shift : shift + nbytes]
        assert read(file, data, whole(target)) is None
        assert bytes(target.numpy()) == data


@pytest.mark.parametrize("flipped", [0, 5 * MIB + 3, 20 * MIB - 1])
def test_damage_is_told(file: int, flipped: int) -> None:
    data = os.urandom(20 * MIB)
    damaged = bytearray(data)
    damaged[flipped] ^= 1
    os.write(file, damaged)
    chunk = flipped // MIB
    expected = (chunk, zlib.crc32(damaged[chunk * MIB : (chunk + 1) * MIB]))
    memory = torch.empty(20 * MIB, dtype=torch.uint8)
    for _ in range(4):  # by both ways
        assert read(file, data, whole(memory)) == expected
        assert read(file, data, no_runs()) == expected
    flags = bytearray(b"\1" * 20)
    flags[chunk] = 0
    assert read(file, data, whole(memory), checked=bytes(flags)) is None


def test_a_file_that_ends_too_early(file: int) -> None:
    """Pages beyond its end are mapped, and are not there: that is no end of the process."""
    data = os.urandom(20 * MIB)
    os.write(file, data)
    memory = torch.empty(20 * MIB, dtype=torch.uint8)
    assert read(file, data, whole(memory)) is None
    for length in (15 * MIB + 7, 0):
        os.ftruncate(file, length)
        for runs in (whole(memory), no_runs()):
            assert read(file, data, runs) == (length // MIB, None)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="directory"):
        read(descriptor, b"x" * 64, no_runs())
    os.close(descriptor)


def test_several_reads_of_files_that_lie_at_the_same_place(tmp_path: Path) -> None:
    """What is mapped of one file is not taken for another's, whatever the order."""
    contents = [os.urandom(4 * MIB) for _ in range(3)]
    files = []
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
        files.append(os.open(tmp_path / str(number), os.O_RDONLY))
    memory = torch.zeros(6, 2 * MIB, dtype=torch.uint8)
    reads = [
        (
            *(files[number], at, 2 * MIB, whole(memory[2 * number + at // (2 * MIB)])),
            *(0, 2 * MIB, sums(contents[number][at : at + 2 * MIB], MIB), b"\1\1"),
        )
        for at in (0, 2 * MIB)
        for number in range(3)
    ]
    try:
        assert _core.FileReader().read(reads, MIB) is None
        assert bytes(memory.flatten().numpy()) == b"".join(contents)
        wrong = (*reads[4][:6], bytes(8), b"\0\1")
        found = _core.FileReader().read([*reads[:4], wrong, reads[5]], MIB)
        assert found == (4, 1, zlib.crc32(contents[1][3 * MIB :]), 0)
    finally:
        for descriptor in files:
            os.close(descriptor)


def test_arguments_that_make_no_sense(file: int) -> None:
    os.write(file, data := b"x" * 64)
    memory = ctypes.create_string_buffer(64)
    address = ctypes.addressof(memory)
    for runs in (
        (address, 1, 64, [], [], []),
        (address, 0, 0, [], [], []),
        (address, 0, 32, [3], [32], [32]),
    ):
        with pytest.raises(ValueError, match="within the part"):
            read(file, data, runs)
    with pytest.raises(ValueError, match="for each chunk"):
        read(file, data, no_runs(), checked=b"")


def test_memory_is_copied() -> None:
    x, y = os.urandom(3 * MIB), bytearray(3 * MIB)
    to = ctypes.addressof(ctypes.c_char.from_buffer(y))
    held = ctypes.create_string_buffer(x, len(x))
    source = ctypes.addressof(held)
    _core.copy_streamed([(to, source, MIB + 1), (to + MIB + 1, source + MIB + 1, 2 * MIB - 1)])
    assert bytes(y) == x


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shares_of_columns_make_the_checksum(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the columns are, and in whichever way they are read."""
    rows, columns = data.draw(st.integers(1, 600)), data.draw(st.integers(64, 5000))
    saved = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32)
    content = bytes(saved.view(-1).view(torch.uint8).numpy())
    offset, chunk = (
        data.draw(st.integers(0, 5000)),
        data.draw(st.sampled_from([4096, 1 << 16, MIB])),
    )
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(b"-" * offset + content)
    cuts = sorted(data.draw(st.sets(st.integers(1, columns // 16 - 1), max_size=3)))
    edges = [0, *(16 * cut for cut in cuts), columns]
    total = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for begin, end in pairwise(edges):
            target = torch.zeros(rows, end - begin, dtype=torch.int32)
            runs = runs_of(Box((0, 0), (rows, columns)), Box((0, begin), target.shape), target)
            assert runs is not None
            found, wrong = read_shares(descriptor, offset, len(content), chunk, runs)
            assert wrong is None
            total ^= int.from_bytes(found, "little")
            assert target.equal(saved[:, begin:end])
    finally:
        os.close(descriptor)
    of_zeros = int.from_bytes(sums(bytes(len(content)), chunk), "little")
    assert (total ^ of_zeros).to_bytes(len(sums(content, chunk)), "little") == sums(content, chunk)


def test_shares_of_a_file_that_ends_too_early(file: int) -> None:
    os.write(file, os.urandom(10 * MIB))
    memory = torch.empty(5 * MIB, dtype=torch.uint8)
    for run in (4096, 512 << 10):
        runs = (memory.data_ptr(), 0, run, [5 * MIB // run], [2 * run], [run])
        for length in (10 * MIB, 7 * MIB + 5):
            os.ftruncate(file, length)
            _, wrong = read_shares(file, 0, 10 * MIB, MIB, runs)
            assert wrong == (None if length == 10 * MIB else (0, 7, None, 0))
        os.ftruncate(file, 10 * MIB)
