"""Memory of tensors as bytes: to write it, to read into it, and to checksum it."""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.format import TORCH_NAMES
from tilework.checkpoint.save_planning import cut_box
from tilework.layout import Box
from tilework.layout.internal import whole_box
from tilework.optional_core import core as _core

#: By the index's name.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, theirs) for name, theirs in TORCH_NAMES.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, where: str = "a tensor") -> str:
    """The index's name of a dtype. Raises TypeError, with ``where``, if there is none."""
    name = NAMES.get(dtype)
    if name is None:
        raise TypeError(
            f"{where} has dtype {dtype}, which a checkpoint cannot hold; it holds "
            f"{', '.join(str(known).removeprefix('torch.') for known in NAMES)}"
        )
    return name


#: The places of a box's elements, in the core's form: the address of the first run, its offset in
#: the part, the bytes of a run, and for each dim the number of runs, and their distances in the
#: part and in memory.
Runs = tuple[int, int, int, list[int], list[int], list[int]]
#: From this size on large pages, and several threads, are worth it.
_LARGE_BYTES = 8 << 20
#: torch copies shorter runs faster.
_SHORTEST_RUN = 64


def no_runs() -> Runs:
    """Runs that have no bytes."""
    return 0, 0, 0, [], [], []


def runs_of(part: Box, box: Box, target: Tensor) -> Runs | None:
    """The runs of a box's bytes in a part, to be written to ``target``; None: not by the core."""
    if target.device.type != "cpu" or target.is_conj() or target.is_neg() or box.empty:
        return None
    itemsize = target.element_size()
    runs = _runs(
        part, box, target.data_ptr(), [itemsize * each for each in target.stride()], itemsize
    )
    return None if runs[3] and runs[2] < _SHORTEST_RUN else runs


def runs_in_place(part: Box, box: Box, address: int, itemsize: int) -> Runs:
    """The runs of a box's bytes in a part, to be written to a copy of the whole part."""
    strides = [itemsize]
    for size in reversed(part.sizes[1:]):
        strides.insert(0, strides[0] * size)
    first = sum(
        (start - offset) * stride
        for offset, start, stride in zip(part.offsets, box.offsets, strides, strict=False)
    )
    return _runs(part, box, address + first, strides, itemsize)


def _runs(part: Box, box: Box, address: int, strides: Sequence[int], itemsize: int) -> Runs:
    first, distance = 0, itemsize
    dims: list[tuple[int, int, int]] = []  # the last first
    for offset, start, size, length, stride in zip(
        reversed(part.offsets),
        reversed(box.offsets),
        reversed(part.sizes),
        reversed(box.sizes),
        reversed(strides),
        strict=False,
    ):
        first += (start - offset) * distance
        if length > 1:
            dims.append((length, distance, stride))
        distance *= size
    run, inner = itemsize, 0
    for length, apart, stride in dims:
        if not apart == stride == run:
            break
        run *= length
        inner += 1
    outer = dims[inner:][::-1]
    counts, apart_from, apart_to = ([each[k] for each in outer] for k in range(3))
    return address, first, run, counts, apart_from, apart_to


def byte_view(tensor: Tensor) -> memoryview:
    r"""The bytes of a contiguous tensor on the CPU. The view keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def address_of(memory: memoryview) -> int:
    """The address of a writable memoryview's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def crc32(memory: memoryview, crc: int = 0) -> int:
    """The CRC-32 of earlier bytes, whose CRC-32 is ``crc``, followed by ``memory``."""
    if _core is None or memory.readonly or memory.nbytes < 4096:
        return zlib.crc32(memory, crc)
    return _core.crc32(address_of(memory), memory.nbytes, crc)


def is_in_place(view: Tensor) -> bool:
    """True if a tensor's elements lie in row-major order, without gaps, in CPU memory."""
    return (
        view.device.type == "cpu"
        and view.is_contiguous()
        and not view.is_conj()
        and not view.is_neg()
    )


def pieces_in_order(view: Tensor, most_bytes: int) -> Iterator[Tensor]:
    """The elements of a tensor in row-major order, in flat tensors of ``most_bytes`` on the CPU."""
    view, itemsize = view.detach(), view.element_size()
    if is_in_place(view):
        flat = view.as_strided((view.numel(),), (1,))
        yield from torch.split(flat, max(1, most_bytes // itemsize))
        return
    for box in cut_box(whole_box(tuple(view.shape)), itemsize, most_bytes):
        plain = view[box.slices].resolve_conj().resolve_neg().to("cpu").contiguous()
        yield plain.as_strided((plain.numel(),), (1,))


def full_crc32(tensor: Tensor, most_bytes: int = 1 << 20) -> int:
    """The CRC-32 of a tensor's elements in row-major order."""
    crc = 0
    for piece in pieces_in_order(tensor, most_bytes):
        crc = crc32(byte_view(piece), crc)
    return crc


def lasting_bytes(nbytes: int) -> Tensor:
    """Uninitialised memory on the CPU for repeated use: in large pages, if possible."""
    if nbytes < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return empty_bytes(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_all(sources: Sequence[tuple[int, Tensor]], memory: Tensor) -> None:
    """Copy tensors into bytes on the CPU, each from an aligned byte on, past the CPU's caches."""
    plain: list[tuple[int, int, int]] = []
    address = memory.data_ptr()
    for start, source in sources:
        nbytes = source.nbytes
        if _core is not None and is_in_place(source):
            plain.append((address + start, source.data_ptr(), nbytes))
        else:
            target = memory[start : start + nbytes].view(source.dtype).view(source.shape)
            target.copy_(source)
    if not plain:
        return
    total = sum(nbytes for _, _, nbytes in plain)
    count = max(1, min(torch.get_num_threads(), total // _LARGE_BYTES))
    if count == 1:
        _core.copy_streamed(plain)
        return
    with ThreadPoolExecutor(count) as pool:
        deque(pool.map(_core.copy_streamed, _shares(plain, -(-total // count))), 0)


def _shares(
    copies: Sequence[tuple[int, int, int]], most_bytes: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut copies (target address, source address, bytes) into lists of ``most_bytes`` at most."""
    share, room = list[tuple[int, int, int]](), most_bytes
    for target, source, nbytes in copies:
        done = 0
        while done < nbytes:
            now = min(room, nbytes - done)
            share.append((target + done, source + done, now))
            done, room = done + now, room - now
            if not room:
                yield share
                share, room = [], most_bytes
    if share:
        yield share


def empty_bytes(nbytes: int) -> Tensor:
    """Uninitialised memory on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8)
