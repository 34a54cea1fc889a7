"""Split parts of local files: each rank of a host reads what it needs, and all check it together.

Checksums are affine: what a rank has read has a share in the checksum of a chunk, wherever in the
chunk it lies, and the exclusive or of all ranks' shares is that of the chunk but for a constant. So
no rank reads what another one needs, as columns of rows would have it; four bytes of each chunk are
exchanged when all is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tilework.checkpoint.format import Part, chunk_count
from tilework.checkpoint.load_planning import LoadPlan, Wanted
from tilework.checkpoint.memory import crc32
from tilework.checkpoint.reading import PartReader
from tilework.checkpoint.sharing import TargetOf
from tilework.comm.collectives import all_reduce
from tilework.comm.contract import ProcessGroup
from tilework.comm.reduce_op import ReduceOp
from tilework.errors import CheckpointError


class SplitReading:
    """The reading of split parts on one rank.

    Args:
        group: The ranks of the host.
        plan: This rank's.
        wanted: The tensors.
        reader: Reads parts.
        target_of: Finds the memory for this rank's needs.
        progress: Told the bytes of each need.
    """

    def __init__(
        self,
        group: ProcessGroup,
        plan: LoadPlan,
        wanted: Sequence[Wanted],
        reader: PartReader,
        target_of: TargetOf,
        progress: Callable[[int], None],
    ) -> None:
        self._group, self._parts, self._wanted = group, plan.split, wanted
        self._reader, self._target_of, self._progress = reader, target_of, progress
        self._here = group.global_ranks[group.rank()]

    def run(self) -> None:
        """Read, and compare. Collective over the group, unless nothing is to be verified.

        Raises:
            CheckpointError: What this rank needs some of is damaged; or it is missing, on the rank
                that noticed.
        """
        ranks = self._group.size()
        shares = torch.zeros(ranks + sum(self._chunks()), dtype=torch.int32)
        failure: CheckpointError | OSError | None = None
        try:
            self._read(shares[ranks:])
        except (CheckpointError, OSError) as error:
            failure, shares[self._group.rank()] = error, 1
        if self._reader.verify:
            all_reduce(shares, ReduceOp.BXOR, group=self._group)
        if failure is not None:
            raise failure
        if self._reader.verify and not shares[:ranks].any():  # else that rank tells
            self._compare(shares[ranks:])

    def _chunks(self) -> Iterator[int]:
        for _, part, _ in self._parts:
            yield chunk_count(part.nbytes, self._reader.index.chunk_bytes)

    def _read(self, shares: Tensor) -> None:
        here, reader = self._here, self._reader
        for turn, ((number, part, needs), own) in enumerate(
            zip(self._parts, torch.split(shares, list(self._chunks())), strict=True)
        ):
            tensor = self._wanted[number].saved
            for need in needs:
                if here not in need.ranks:
                    continue
                target = self._target_of(number, need)
                nbytes = need.box.volume * tensor.torch_dtype.itemsize
                counts = need.ranks[turn % len(need.ranks)] == here
                if self._reader.verify and counts:
                    own ^= reader.read_split_box(tensor, part, need.box, target)
                else:
                    reader.read_unchecked_box(tensor, part, need.box, target)
                reader.bytes_read += nbytes if counts else 0
                self._progress(nbytes)

    def _compare(self, sums: Tensor) -> None:
        for (number, part, needs), found in zip(
            self._parts, torch.split(sums, list(self._chunks())), strict=True
        ):
            if not any(self._here in need.ranks for need in needs):
                continue
            found ^= self._of_zeros(part)
            expected = torch.tensor(part.crc32, dtype=torch.uint32).view(torch.int32)
            wrong = (found != expected).nonzero().flatten().tolist()
            if wrong:
                crc = int(found[wrong[0]]) & 0xFFFFFFFF
                raise self._reader.damaged(self._wanted[number].saved, part, wrong[0], crc)

    def _of_zeros(self, part: Part) -> Tensor:
        """The checksums of the part's chunks, were all of it zeros."""
        chunk = self._reader.index.chunk_bytes
        count = chunk_count(part.nbytes, chunk)
        last = part.nbytes - (count - 1) * chunk
        sums = [crc32_of_zeros(chunk)] * (count - 1) + [crc32_of_zeros(last)]
        return torch.tensor(sums, dtype=torch.uint32).view(torch.int32)


@lru_cache(maxsize=64)
def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of so many zeros.

    Example:
        >>> crc32_of_zeros(1) == 0xD202EF8D
        True
    """
    return crc32(memoryview(bytearray(nbytes)))
