"""Reading of parts: each chunk is read as a whole and checked before any of it is used.

The core reads local files, and checks bytes while it puts them in place, in one pass over memory
(csrc/files/file_reader.h). A buffer serves for files of other stores, for tensors on other devices,
and for elements that are converted to another dtype.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from tilework.checkpoint.format import Index, Part, SavedTensor, chunk_count
from tilework.checkpoint.load_planning import Need, Wanted, blocks_of, span
from tilework.checkpoint.storage import FileReader, Storage
from tilework.checkpoint.tensor_bytes import (
    DTYPES,
    Runs,
    address_of,
    byte_view,
    crc32,
    empty_bytes,
    no_runs,
    runs_in_place,
    runs_of,
)
from tilework.errors import CheckpointError
from tilework.layout import Box
from tilework.layout.internal import BoxIndex
from tilework.optional_core import core as _core
from tilework.tiled import TiledTensor

#: The bytes read by one call of the core: signals and progress come between calls.
CALL_BYTES = 64 << 20


class CoreRead(NamedTuple):
    """A read of the chunks in ``reach``, for ``runs`` of wanted bytes; progress is ``counted``."""

    tensor: SavedTensor
    part: Part
    runs: Runs
    reach: tuple[int, int]
    counted: int = 0


#: The core's arguments for a read, the read, and the bytes to report.
_Listed = tuple[tuple[Any, ...], CoreRead, int]


#: The checks of a read: a byte for each chunk, 1 to compare the checksum; or the place in shares of
#: checksums from which on the read adds to them.
Checks = bytes | int


class CoreReads:
    """The reads of a PartReader that the core does, at the latest in :meth:`run`.

    A call of the core for many short reads is cheaper than a call for each: between two calls
    Python would run, whose memory has left the CPU's caches by then.
    """

    def __init__(self, reader: PartReader) -> None:
        self._reader, self._core = reader, _core.FileReader()
        #: The memory to which shares in checksums are added: uint32.
        self.shares = memoryview(b"")
        self._checked: list[_Listed] = []
        self._shared: list[_Listed] = []
        self._nbytes = 0

    def add(self, read: CoreRead, checks: Checks) -> None:
        part, (begin, end) = read.part, read.reach
        how: tuple[Any, ...] = (checks,)
        listed = self._shared
        if isinstance(checks, bytes):
            listed, how = self._checked, (array("I", part.crc32).tobytes(), checks)
        place = self._reader.descriptor(part), part.offset, part.nbytes, read.runs
        chunk = self._reader.index.chunk_bytes
        step = max(1, CALL_BYTES // chunk) * chunk
        for at in range(begin, end, step):
            stop = min(at + step, end)
            nbytes = share_of(read.counted, read.reach, at, stop)
            listed.append(((*place, at, stop, *how), read, nbytes))
            self._nbytes += nbytes or stop - at
            if self._nbytes >= CALL_BYTES:
                self.run()

    def run(self) -> None:
        """Do the listed reads that are not done yet; after an error the others are not done."""
        checked, shared = self._checked[:], self._shared[:]
        self._checked.clear()
        self._shared.clear()
        self._nbytes = 0
        chunk = self._reader.index.chunk_bytes
        if checked:
            self._finish(self._core.read([each[0] for each in checked], chunk), checked)
        if shared:
            sums = address_of(self.shares), len(self.shares)
            self._finish(self._core.read_shares([each[0] for each in shared], chunk, *sums), shared)

    def _finish(
        self, wrong: tuple[int, int, int | None, int] | None, listed: list[_Listed]
    ) -> None:
        if wrong is None:
            self._reader.progress(sum(nbytes for *_, nbytes in listed))
            return
        number, chunk, found, error = wrong
        read = listed[number][1]
        if error:
            raise OSError(error, os.strerror(error), self._reader.storage.where(read.part.file))
        raise self._reader.damaged(read.tensor, read.part, chunk, found)


def share_of(counted: int, reach: tuple[int, int], at: int, stop: int) -> int:
    """The number of ``counted`` bytes in ``at`` to ``stop``, if spread evenly over the reach."""
    begin, end = reach
    start, stop, length = max(at, begin), min(stop, end), end - begin
    return counted * (stop - begin) // length - counted * (start - begin) // length


#: The place of a box's elements: a tensor of the box's size, or runs in memory for the core.
Place = Tensor | Runs


class Targets:
    """The tensors that this rank fills: one or None for each wanted tensor.

    Runs are computed once for equal tensors, as models have the same layers many times.
    """

    def __init__(
        self, wanted: Sequence[Wanted], tensors: Sequence[Tensor | None], rank: int, by_core: bool
    ) -> None:
        self._wanted, self._tensors = wanted, tensors
        self._rank, self._by_core = rank, by_core
        self._tiles: dict[tuple[int, int], Tensor] = {}
        #: By id of a need, shared by equal tensors; the need is kept, so that no other gets the id.
        self._runs: dict[object, tuple[Runs | None, Need, Part]] = {}

    def view(self, number: int, need: Need) -> Tensor:
        """The view of this rank's tensor ``number`` that a need fills, of the size of the box."""
        tile, local = self._wanted[number].tiles[need.tile][0], self._tile(number, need.tile)
        return local if need.box is tile else local[need.box.relative_to(tile).slices]

    def place(self, number: int, part: Part, need: Need) -> Place:
        """The place for a need: runs for the core if possible, else the :meth:`view`."""
        saved, local = self._wanted[number].saved, self._tile(number, need.tile)
        if (
            not self._by_core
            or local.device.type != "cpu"
            or local.dtype is not DTYPES[saved.dtype]
        ):
            return self.view(number, need)
        address = local.data_ptr()
        key = id(need), local.stride(), local.dtype, local.is_conj(), local.is_neg()
        known = self._runs.get(key)
        if known is None or known[1] is not need or known[2].box != part.box:
            runs = runs_of(part.box, need.box, self.view(number, need))
            relative = runs and (runs[0] - address, *runs[1:])
            known = self._runs[key] = relative, need, part
        found = known[0]
        return self.view(number, need) if found is None else (found[0] + address, *found[1:])

    def _tile(self, number: int, tile: int) -> Tensor:
        known = self._tiles.get((number, tile))
        if known is None:
            tensor = self._tensors[number]
            assert tensor is not None
            if isinstance(tensor, TiledTensor):
                boxes = tensor.tiling.boxes_of(self._rank)
                tensor = tensor.local_tiles()[boxes.index(self._wanted[number].tiles[tile][0])]
            known = self._tiles[number, tile] = tensor.detach()
        return known


#: The bytes read at once through a buffer, few enough to stay in the cache.
BOUNCE_BYTES = 4 << 20
#: The bytes read and checked at once without the core.
_STEP_BYTES = 256 << 10
#: Up to this number, parts are searched one by one.
_FEW_PARTS = 16
Progress = Callable[[int], None]


def ignored(nbytes: int) -> None:
    """Do nothing with reported progress."""


class PartReader:
    """Reads parts from the files of one checkpoint, which are opened when they are needed."""

    def __init__(self, storage: Storage, index: Index, verify: bool = True) -> None:
        self.storage, self.index, self.verify = storage, index, verify
        self.bytes_read = 0
        #: Called with the bytes of boxes that are read, in the dtype of the checkpoint.
        self.progress: Progress = ignored
        self._by_core = _core is not None and storage.is_local
        self._reads: CoreReads | None = None
        self._is_together = False
        self._open: dict[str, FileReader] = {}
        self._bounce: Tensor | None = None
        #: The parts of the last tensor, if it has many.
        self._parts: tuple[str, BoxIndex] | None = None

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def check_sizes(self, files: Iterable[str], keeps_open: bool = True) -> None:
        for name in files:
            was_open = name in self._open
            self._file(name)
            if not (was_open or keeps_open):
                self._open.pop(name).close()

    def _file(self, name: str) -> FileReader:
        file = self._open.get(name)
        if file is None:
            try:
                file = self.storage.open(name)
            except CheckpointError as error:
                raise self._unreadable(name, str(error)) from None
            expected = self.index.files[name].nbytes
            if file.nbytes != expected:
                file.close()
                raise self._unreadable(
                    name,
                    f"{self.storage.where(name)} has {file.nbytes:,} bytes, the index says "
                    f"{expected:,}: it is truncated, or of another checkpoint",
                )
            self._open[name] = file
        return file

    def _unreadable(self, name: str, what: str) -> CheckpointError:
        """The error for a file with the problem ``what``; names tensors that have parts in it."""
        tensors = [
            tensor.name
            for tensor in self.index.tensors.values()
            if any(part.file == name for part in tensor.parts)
        ]
        listed = ", ".join(map(repr, tensors[:3]))
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        text = f"{what} (it has parts of the tensors {listed}{more})" if tensors else what
        where = self.storage.where(name)
        return CheckpointError(text, file=where, tensor=tensors[0] if tensors else "")

    def parts_of(self, tensor: SavedTensor, box: Box) -> Sequence[Part]:
        """The parts of a tensor that overlap a box, and perhaps parts that do not."""
        if len(tensor.parts) <= _FEW_PARTS:
            return tensor.parts
        if self._parts is None or self._parts[0] != tensor.name:
            self._parts = tensor.name, BoxIndex([part.box for part in tensor.parts])
        return [tensor.parts[number] for number in self._parts[1].overlapping(box)]

    def shares_pages(self) -> bool:
        """True if files are read through the page cache, which the ranks of a host share."""
        return self._by_core

    def all_chunks(self, part: Part) -> bytes:
        """A byte for each chunk of a part: 1 if checksums are verified, else 0."""
        return (b"\1" if self.verify else b"\0") * chunk_count(part.nbytes, self.index.chunk_bytes)

    def read_chunks(self, tensor: SavedTensor, part: Part, start: int, memory: memoryview) -> None:
        """Fill memory with checked bytes of a part from ``start`` on, a multiple of a chunk."""
        self.read_some_chunks(tensor, part, start, memory, self.all_chunks(part))
        self.bytes_read += memory.nbytes

    def read_some_chunks(
        self, tensor: SavedTensor, part: Part, start: int, memory: memoryview, checked: bytes
    ) -> None:
        """As :meth:`read_chunks`, but check only chunks whose byte in ``checked`` is not 0."""
        if self._by_core:
            if memory.nbytes:
                runs: Runs = (address_of(memory), start, memory.nbytes, [], [], [])
                reach = (start, start + memory.nbytes)
                self._read_by_core(CoreRead(tensor, part, runs, reach), checked, at_once=True)
            return
        file, chunk = self._file(part.file), self.index.chunk_bytes
        step_bytes = _STEP_BYTES if self.storage.is_local else chunk
        for at in range(0, memory.nbytes, chunk):
            piece, found = memory[at : at + chunk], 0
            is_checked = checked[(start + at) // chunk]
            for step in range(0, piece.nbytes, step_bytes):
                small = piece[step : step + step_bytes]
                if file.read_into(small, part.offset + start + at + step) < small.nbytes:
                    raise self.damaged(tensor, part, (start + at) // chunk, None)
                found = crc32(small, found) if is_checked else 0
            if is_checked and found != part.crc32[(start + at) // chunk]:
                raise self.damaged(tensor, part, (start + at) // chunk, found)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the core do the reads within the block together, the last at the end."""
        self._is_together = True
        try:
            yield
            if self._reads is not None:
                self._reads.run()
        finally:
            self._is_together = False
            self._reads = None  # after an error, drop the rest

    @property
    def _core_reads(self) -> CoreReads:
        if self._reads is None:
            self._reads = CoreReads(self)
        return self._reads

    def _read_by_core(self, read: CoreRead, checks: Checks, at_once: bool = False) -> None:
        """Let the core do a read: now, or together with others within :meth:`together`."""
        self._core_reads.add(read, checks)
        if at_once or not self._is_together:
            self._core_reads.run()

    def collect_shares(self, shares: memoryview) -> None:
        self._core_reads.shares = shares

    def descriptor(self, part: Part) -> int:
        descriptor = self._file(part.file).descriptor
        assert descriptor is not None
        return descriptor

    def damaged(
        self, tensor: SavedTensor, part: Part, chunk: int, found: int | None
    ) -> CheckpointError:
        """The error for a chunk whose bytes have the checksum ``found``; None: the file ends."""
        where = self.storage.where(part.file)
        if found is None:
            problem = f"{where} ends before the tensor does"
        else:
            begin = part.offset + chunk * self.index.chunk_bytes
            problem = (
                f"bytes from {begin:,} on have the CRC-32 {found}, the index says "
                f"{part.crc32[chunk]}"
            )
        return CheckpointError(
            f"{where}, tensor {tensor.name!r} {part.box}: {problem}. The file is damaged: use "
            f"another checkpoint",
            file=where,
            tensor=tensor.name,
        )

    def read_box(self, tensor: SavedTensor, part: Part, box: Box, target: Place) -> None:
        """Read a box of a part into a tensor of the box's size, or into runs if the core reads."""
        start, stop = self._reach(tensor, part, box, target)
        self._read_box(tensor, part, box, target, self.all_chunks(part), (start, stop))
        self.bytes_read += stop - start

    def read_shared_box(
        self, tensor: SavedTensor, part: Part, box: Box | None, target: Place | None, own: bytes
    ) -> None:
        """Read a box of a part (None: none), and check the chunks with a byte 1 in ``own``."""
        chunk = self.index.chunk_bytes
        first, last = own.find(1), own.rfind(1)
        ranges = [(first * chunk, min((last + 1) * chunk, part.nbytes))] if first >= 0 else []
        if box is not None:
            ranges.append(self._reach(tensor, part, box, target))
        if not ranges:
            return
        reach = (min(start for start, _ in ranges), max(stop for _, stop in ranges))
        checked = own if self.verify else bytes(len(own))
        if box is None or target is None:
            if self.verify:
                self._read_by_core(CoreRead(tensor, part, no_runs(), reach), checked)
        else:
            self._read_box(tensor, part, box, target, checked, reach)
        tail = len(own) * chunk - part.nbytes
        self.bytes_read += own.count(1) * chunk - (tail if own.endswith(b"\1") else 0)

    def read_split_box(
        self, tensor: SavedTensor, part: Part, box: Box, target: Place, place: int | None
    ) -> None:
        """Read a box of a part, and add shares in checksums to the numbers from ``place`` on."""
        unchecked = bytes(chunk_count(part.nbytes, self.index.chunk_bytes))
        reach = self._reach(tensor, part, box, target)
        self._read_box(tensor, part, box, target, unchecked if place is None else place, reach)

    def _reach(
        self, tensor: SavedTensor, part: Part, box: Box, target: Place | None
    ) -> tuple[int, int]:
        """The range of a part's bytes that the chunks overlapping a box have; (0, 0) if empty."""
        chunk = self.index.chunk_bytes
        if isinstance(target, tuple):
            _, first, run, counts, apart, _ = target
            last = first + run
            for count, distance in zip(counts, apart, strict=True):
                last += (count - 1) * distance
        else:
            first, last = (tensor.itemsize * each for each in span(part.box, box))
            if first == last or box.empty:
                return 0, 0
        return first // chunk * chunk, min(-(-last // chunk) * chunk, part.nbytes)

    def _read_box(
        self,
        tensor: SavedTensor,
        part: Part,
        box: Box,
        target: Place,
        checks: Checks,
        reach: tuple[int, int],
    ) -> None:
        if reach[0] == reach[1]:
            return
        dtype, counted = DTYPES[tensor.dtype], box.volume * tensor.itemsize
        runs: Runs | None = target if isinstance(target, tuple) else None
        if isinstance(target, Tensor) and target.dtype is dtype:
            runs = runs_of(part.box, box, target)
        if runs is not None and self._by_core:
            self._read_by_core(CoreRead(tensor, part, runs, reach, counted), checks)
            return
        assert isinstance(target, Tensor)  # runs without a tensor are for the core
        is_whole = runs is not None and (*reach, counted) == (runs[1], runs[1] + runs[2], runs[2])
        if is_whole and isinstance(checks, bytes):
            self.read_some_chunks(tensor, part, reach[0], byte_view(target), checks)
            self.progress(counted)
            return
        for start, stop in self._bounces(part, *reach):
            memory = self._bounced(stop - start)
            if isinstance(checks, bytes):
                self.read_some_chunks(tensor, part, start, byte_view(memory), checks)
            else:
                runs = runs_in_place(part.box, box, memory.data_ptr() - start, tensor.itemsize)
                read = CoreRead(tensor, part, runs, (start, stop))
                self._read_by_core(read, checks, at_once=True)
            copy_region(memory.view(dtype), part, start // tensor.itemsize, box, target)
            self.progress(share_of(counted, reach, start, stop))

    def _bounces(self, part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut the bytes from ``start`` to ``stop`` of a part into ranges of whole chunks."""
        chunk = self.index.chunk_bytes
        step = max(1, BOUNCE_BYTES // chunk) * chunk
        for at in range(start // chunk * chunk, stop, step):
            yield at, min(at + step, -(-stop // chunk) * chunk, part.nbytes)

    def _bounced(self, nbytes: int) -> Tensor:
        if self._bounce is None or self._bounce.numel() < nbytes:
            self._bounce = empty_bytes(max(BOUNCE_BYTES, nbytes))
        return self._bounce[:nbytes]


def read_region(reader: PartReader, tensor: SavedTensor, box: Box, target: Tensor) -> None:
    """Read any box of a tensor, from all parts that overlap it, into a tensor of the box's size."""
    for part in reader.parts_of(tensor, box):
        shared = part.box.intersection(box)
        if shared is not None:
            reader.read_box(tensor, part, shared, target[shared.relative_to(box).slices])


def copy_region(elements: Tensor, part: Part, start: int, box: Box, target: Tensor) -> None:
    """Copy those of a part's consecutive elements, from ``start`` on, that are in a box."""
    for at, block in blocks_of(part.box, start, start + elements.numel()):
        shared = block.intersection(box)
        if shared is not None:
            source = elements[at : at + block.volume].view(block.sizes)
            target[shared.relative_to(box).slices].copy_(source[shared.relative_to(block).slices])
