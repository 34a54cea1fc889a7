"""Split parts of local files: each rank of a host reads its own runs, and all ranks check together.

Checksums are affine: bytes at any place in a chunk have a share in the chunk's checksum, which can
be computed without the other bytes. The exclusive or of all ranks' shares is the chunk's checksum
up to a constant. Therefore no rank needs to read the bytes of another rank, even if each rank needs
columns; four bytes for each chunk are exchanged after reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import xor

import torch

from tilework.checkpoint.format import chunk_count
from tilework.checkpoint.host_load import HostLoad
from tilework.checkpoint.load_planning import SharedPart
from tilework.checkpoint.memory import crc32
from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.operations.internal import all_reduce


def read_split(load: HostLoad) -> None:
    """Read this rank's runs of split parts, and compare checksums. Collective over the host.

    Raises:
        CheckpointError: A part that this rank needs is damaged; or this rank could not read.
    """
    if load.group is not None and load.plan.split:
        _SplitReading(load, load.group).run()


class _SplitReading:
    """The reading of split parts on this rank, together with the other ranks of the host."""

    def __init__(self, load: HostLoad, group: ProcessGroup) -> None:
        self._group, self._parts, self._wanted = group, load.plan.split, load.wanted
        self._reader, self._targets, self._here = load.reader, load.targets, load.rank

    def run(self) -> None:
        """Read this rank's runs, and compare the combined checksums if they are verified."""
        ranks = self._group.size()
        shares = bytearray(4 * (ranks + sum(map(self._chunks, self._parts))))
        failure: Exception | None = None
        try:
            self._read(memoryview(shares)[4 * ranks :].cast("I"))
        except Exception as error:  # of any class: the other ranks wait in the reduction
            shares[4 * self._group.rank()] = 1
            failure = error
        if self._reader.verify:
            all_reduce(torch.frombuffer(shares, dtype=torch.int32), ReduceOp.BXOR, self._group)
        if failure is not None:
            raise failure
        if self._reader.verify and not any(shares[: 4 * ranks]):  # else the reduction tells
            self._compare(memoryview(shares)[4 * ranks :].cast("I"))

    def _chunks(self, split: SharedPart) -> int:
        return chunk_count(split.part.nbytes, self._reader.index.chunk_bytes)

    def _read(self, shares: memoryview) -> None:
        """Read this rank's runs, and add their shares in the checksums of chunks to ``shares``.

        ``shares`` has a uint32 for each chunk of each split part.
        """
        here, reader, place = self._here, self._reader, 0
        with reader.together():
            reader.collect_shares(shares)
            for turn, split in enumerate(self._parts):
                tensor = self._wanted[split.tensor].saved
                for need in split.needs:
                    if here not in need.ranks:
                        continue
                    target = self._targets.place(split.tensor, split.part, need)
                    counts = need.ranks[turn % len(need.ranks)] == here
                    if reader.verify and counts:
                        reader.read_split_box(tensor, split.part, need.box, target, place)
                    else:
                        reader.read_unchecked_box(tensor, split.part, need.box, target)
                    nbytes = need.box.volume * tensor.itemsize
                    reader.bytes_read += nbytes if counts else 0
                place += self._chunks(split)

    def _compare(self, sums: Sequence[int]) -> None:
        chunk, at = self._reader.index.chunk_bytes, 0
        for split in self._parts:
            part, count = split.part, self._chunks(split)
            if any(self._here in need.ranks for need in split.needs):
                last = part.nbytes - (count - 1) * chunk
                zeros = [crc32_of_zeros(chunk)] * (count - 1) + [crc32_of_zeros(last)]
                found = list(map(xor, sums[at : at + count], zeros))
                if found != list(part.crc32):
                    wrong = next(k for k in range(count) if found[k] != part.crc32[k])
                    tensor = self._wanted[split.tensor].saved
                    raise self._reader.damaged(tensor, part, wrong, found[wrong])
            at += count


@lru_cache(maxsize=64)
def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of ``nbytes`` zeros.

    Example:
        >>> crc32_of_zeros(1) == 0xD202EF8D
        True
    """
    return crc32(memoryview(bytearray(nbytes)))
