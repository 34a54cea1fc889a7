"""Reading of parts: each chunk is read as a whole and checked before any of it is used."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tilework.checkpoint.format import Index, Part, SavedTensor
from tilework.checkpoint.load_planning import blocks_of, span
from tilework.checkpoint.memory import byte_view, crc32, empty_bytes, is_in_place
from tilework.checkpoint.storage import FileReader, Storage
from tilework.errors import CheckpointError
from tilework.layout import Box

#: What is read at once where it cannot go straight to its place: so it is still in the cache.
BOUNCE_BYTES = 4 << 20
#: Read and checked at once.
_STEP_BYTES = 256 << 10


class PartReader:
    """The files of one checkpoint, opened when they are needed.

    Args:
        storage: The place.
        index: The checkpoint's.
        verify: Compare checksums.
    """

    def __init__(self, storage: Storage, index: Index, verify: bool = True) -> None:
        self.storage, self.index, self.verify = storage, index, verify
        self.bytes_read = 0
        # In the cache still when it is checked; requests of a store are better few.
        self._step = _STEP_BYTES if storage.is_local else index.chunk_bytes
        self._open: dict[str, FileReader] = {}
        self._bounce: Tensor | None = None

    def close(self) -> None:
        """Close all files. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def check_sizes(self, files: list[str]) -> None:
        """Raise if files are missing, or not as long as the index says.

        Raises:
            CheckpointError: It names the first one.
        """
        for name in files:
            self._file(name)

    def _file(self, name: str) -> FileReader:
        file = self._open.get(name)
        if file is None:
            file = self.storage.open(name)
            expected = self.index.files[name].nbytes
            if file.nbytes != expected:
                file.close()
                where = self.storage.where(name)
                raise CheckpointError(
                    f"{where} has {file.nbytes:,} bytes, the index says {expected:,}: it is "
                    f"truncated, or of another checkpoint",
                    file=where,
                )
            self._open[name] = file
        return file

    def read_chunks(self, tensor: SavedTensor, part: Part, start: int, memory: memoryview) -> None:
        """Fill memory with a part's bytes from ``start`` on, a multiple of a chunk, and check them.

        Raises:
            CheckpointError: They are damaged or missing.
        """
        file, chunk = self._file(part.file), self.index.chunk_bytes
        for at in range(0, memory.nbytes, chunk):
            piece, found = memory[at : at + chunk], 0
            for step in range(0, piece.nbytes, self._step):
                small = piece[step : step + self._step]
                count = file.read_into(small, part.offset + start + at + step)
                if count < small.nbytes:
                    where = self.storage.where(part.file)
                    raise self._damaged(tensor, part, f"{where} ends before the tensor does")
                found = crc32(small, found) if self.verify else 0
            if self.verify:
                expected = part.crc32[(start + at) // chunk]
                if found != expected:
                    raise self._damaged(
                        tensor,
                        part,
                        f"bytes from {part.offset + start + at:,} on have the CRC-32 {found}, "
                        f"the index says {expected}",
                    )
        self.bytes_read += memory.nbytes

    def _damaged(self, tensor: SavedTensor, part: Part, problem: str) -> CheckpointError:
        where = self.storage.where(part.file)
        return CheckpointError(
            f"{where}, tensor {tensor.name!r} {part.box}: {problem}. The file is damaged: use "
            f"another checkpoint",
            file=where,
            tensor=tensor.name,
        )

    def read_box(self, tensor: SavedTensor, part: Part, box: Box, target: Tensor) -> None:
        """Read a box of a part into a tensor of its size.

        Args:
            tensor: The tensor.
            part: The part.
            box: Within the part, in the full tensor's coordinates.
            target: Overwritten; of any dtype and device.

        Raises:
            CheckpointError: What is read is damaged.
        """
        itemsize = tensor.torch_dtype.itemsize
        first, last = span(part.box, box)
        is_run = last - first == box.volume
        if is_run and target.dtype is tensor.torch_dtype and is_in_place(target):
            self._read_run(tensor, part, first * itemsize, byte_view(target))
            return
        for start, stop in self._bounces(part, first * itemsize, last * itemsize):
            memory = self._bounced(tensor, part, start, stop)
            copy_region(memory.view(tensor.torch_dtype), part, start // itemsize, box, target)

    def _bounces(self, part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The ranges of whole chunks that have a part's bytes from ``start`` to ``stop``."""
        chunk = self.index.chunk_bytes
        step = max(1, BOUNCE_BYTES // chunk) * chunk
        for at in range(start // chunk * chunk, stop, step):
            yield at, min(at + step, -(-stop // chunk) * chunk, part.nbytes)

    def _bounced(self, tensor: SavedTensor, part: Part, start: int, stop: int) -> Tensor:
        if self._bounce is None or self._bounce.numel() < stop - start:
            self._bounce = empty_bytes(max(BOUNCE_BYTES, stop - start))
        memory = self._bounce[: stop - start]
        self.read_chunks(tensor, part, start, byte_view(memory))
        return memory

    def _read_run(self, tensor: SavedTensor, part: Part, start: int, memory: memoryview) -> None:
        """Read a run of bytes in place, but for the chunks that it shares with others."""
        chunk, stop = self.index.chunk_bytes, start + memory.nbytes
        whole_from = min(-(-start // chunk) * chunk, stop)
        whole_to = stop if stop == part.nbytes else max(stop // chunk * chunk, whole_from)
        for low, high in ((start, whole_from), (whole_to, stop)):
            if low < high:
                from_ = low // chunk * chunk
                chunk_memory = byte_view(
                    self._bounced(tensor, part, from_, min(from_ + chunk, part.nbytes))
                )
                memory[low - start : high - start] = chunk_memory[low - from_ : high - from_]
        if whole_from < whole_to:
            inside = memory[whole_from - start : whole_to - start]
            self.read_chunks(tensor, part, whole_from, inside)


def read_region(reader: PartReader, tensor: SavedTensor, box: Box, target: Tensor) -> None:
    """Read any box of a tensor, from all parts that have some of it.

    Args:
        reader: The checkpoint's files.
        tensor: The tensor.
        box: The region, in its coordinates.
        target: Overwritten; a tensor of the box's size.

    Raises:
        CheckpointError: What is read is damaged.
    """
    for part in tensor.parts:
        shared = part.box.intersection(box)
        if shared is not None:
            reader.read_box(tensor, part, shared, target[shared.relative_to(box).slices])


def copy_region(elements: Tensor, part: Part, start: int, box: Box, target: Tensor) -> None:
    """Copy what some elements of a part have of a box.

    Args:
        elements: They, one after the other.
        part: The part.
        start: The number of the first.
        box: Within the part.
        target: A tensor of the box's size.
    """
    for at, block in blocks_of(part.box, start, start + elements.numel()):
        shared = block.intersection(box)
        if shared is not None:
            source = elements[at : at + block.volume].view(block.sizes)
            target[shared.relative_to(box).slices].copy_(source[shared.relative_to(block).slices])
