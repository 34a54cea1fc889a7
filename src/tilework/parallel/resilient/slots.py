"""The memory of snapshots, which outlives the rank that wrote it.

Each rank has two *slots*, written in turn: while a rank writes one slot, the other holds the step
before. After writing a slot a rank stamps it with the number of finished steps. Ranks meet after
each snapshot: no two are more than one snapshot apart, and one slot of each rank has the last step
that all have finished.

On a single host a rank writes into a memory file that all others have opened. The kernel keeps the
file for them when the rank is gone: one copy of the state serves for any number of deaths. Across
hosts, or on request, a slot is sent to ``replicas`` ranks at a distance in rank order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.operations.internal import agree, irecv, isend
from tilework.memory_files import NO_MEMORY_FILE, MemoryFile

SLOTS: Final = 2
#: The tag of messages in the default group: a number that no program would choose.
_DATA_TAG, _STAMP_TAG = 1_985_301, 1_985_302
#: The stamp and the number of bytes of plain data, for each slot.
_STAMP = struct.Struct("=qq")
_PAGE: Final = 4096
_NEVER: Final = -1


@dataclass(frozen=True)
class AreaLayout:
    """The layout of each rank's area: a page of stamps, then the slots in whole pages: the bytes of
    tensors, and room for plain data behind them.
    """

    tensor_bytes: tuple[int, ...]
    plain_bytes: int

    def stride(self, rank: int) -> int:
        """The bytes of one slot."""
        return -(-(self.tensor_bytes[rank] + self.plain_bytes) // _PAGE) * _PAGE

    def slot(self, rank: int, slot: int) -> int:
        """The byte at which a slot begins."""
        return _PAGE + slot * self.stride(rank)

    def area(self, rank: int) -> int:
        """The bytes of the area."""
        return self.slot(rank, SLOTS)


class Slots(ABC):
    """The slots of all ranks of a group, as one of the ranks sees them."""

    def __init__(self, layout: AreaLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank

    @abstractmethod
    def area(self, rank: int) -> Any:
        """The buffer of a rank's area; None if this rank does not have it."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Idempotent."""

    def tensor_bytes(self, rank: int, slot: int) -> Tensor:
        """The bytes of the tensors in a rank's slot, which must be here."""
        return self._bytes(rank, self.layout.slot(rank, slot), self.layout.tensor_bytes[rank])

    def stamp(self, rank: int, slot: int) -> int | None:
        """The number of finished steps in a slot; None if the slot is elsewhere, or incomplete."""
        area = self.area(rank)
        if area is None:
            return None
        steps, _ = _STAMP.unpack_from(area, slot * _STAMP.size)
        return None if steps == _NEVER else int(steps)

    def plain(self, rank: int, slot: int) -> bytes:
        """The plain data in a rank's slot, which must be here."""
        area = self.area(rank)
        _, nbytes = _STAMP.unpack_from(area, slot * _STAMP.size)
        start = self.layout.slot(rank, slot) + self.layout.tensor_bytes[rank]
        return bytes(memoryview(area)[start : start + nbytes])

    def begin(self, slot: int) -> None:
        """Remove the stamp of this rank's slot before the slot is written. Local."""
        _STAMP.pack_into(self.area(self.rank), slot * _STAMP.size, _NEVER, 0)

    def finish(self, slot: int, steps: int, plain: bytes) -> None:
        """Write the plain data of this rank's slot, and stamp it."""
        area = self.area(self.rank)
        start = self.layout.slot(self.rank, slot) + self.layout.tensor_bytes[self.rank]
        memoryview(area)[start : start + len(plain)] = plain
        _STAMP.pack_into(area, slot * _STAMP.size, steps, len(plain))

    def _bytes(self, rank: int, start: int, count: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.area(rank), dtype=torch.uint8, offset=start, count=count)


class SharedSlots(Slots):
    """Areas in memory files, which every rank of the host has opened; this closes the
    descriptors.
    """

    def __init__(self, layout: AreaLayout, rank: int, fds: Sequence[int]) -> None:
        super().__init__(layout, rank)
        self._fds = list(fds)
        self._areas: dict[int, mmap.mmap] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._fds)

    def area(self, rank: int) -> Any:
        area = self._areas.get(rank)
        if area is None:
            area = self._areas[rank] = mmap.mmap(self._fds[rank], self.layout.area(rank))
        return area

    def close(self) -> None:
        self._finalizer()
        self._areas.clear()  # unmapped with the last tensor


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class PeerSlots(Slots):
    """Slots in this rank's memory: the rank's own, and copies of ``replicas`` other ranks'."""

    def __init__(self, layout: AreaLayout, rank: int, replicas: int) -> None:
        super().__init__(layout, rank)
        size = len(layout.tensor_bytes)
        self._keeps = kept_by(rank, size, replicas)
        self._keepers = [r for r in range(size) if rank in kept_by(r, size, replicas)]
        self._areas = {held: bytearray(layout.area(held)) for held in (rank, *self._keeps)}
        for area in self._areas.values():
            _STAMP.pack_into(area, 0, _NEVER, 0)
            _STAMP.pack_into(area, _STAMP.size, _NEVER, 0)

    def area(self, rank: int) -> Any:
        return self._areas.get(rank)

    def finish(self, slot: int, steps: int, plain: bytes) -> None:
        """Stamp this rank's slot, send it to the ranks that keep copies, and receive copies.

        The copies that arrive are of the slots that this rank keeps for others. Blocks.
        """
        super().finish(slot, steps, plain)
        stamp = _STAMP.pack(steps, len(plain))
        stamps = {rank: torch.empty(_STAMP.size, dtype=torch.uint8) for rank in self._keeps}
        works: list[Work | None] = []
        for rank, arriving in stamps.items():
            _STAMP.pack_into(self._areas[rank], slot * _STAMP.size, _NEVER, 0)
            works.append(irecv(self._slot(rank, slot), rank, tag=_DATA_TAG))
            works.append(irecv(arriving, rank, tag=_STAMP_TAG))
        own = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)
        for rank in self._keepers:
            works.append(isend(self._slot(self.rank, slot), rank, tag=_DATA_TAG))
            works.append(isend(own, rank, tag=_STAMP_TAG))
        for work in works:
            if work is not None:
                work.wait()
        for rank, arrived in stamps.items():
            start = slot * _STAMP.size
            self._areas[rank][start : start + _STAMP.size] = bytes(arrived.tolist())

    def _slot(self, rank: int, slot: int) -> Tensor:
        return self._bytes(rank, self.layout.slot(rank, slot), self.layout.stride(rank))

    def close(self) -> None:
        self._areas = {}


def kept_by(rank: int, size: int, replicas: int) -> tuple[int, ...]:
    """The other ranks of which ``rank`` keeps copies of the slots.

    They are spread evenly over all ranks: neighbours in rank order often share a host.

    Example:
        >>> kept_by(0, 8, 1), kept_by(0, 8, 3), kept_by(1, 2, 5)
        ((4,), (6, 4, 2), (0,))
    """
    count = min(replicas, size - 1)
    distance = max(1, size // (count + 1))
    return tuple(dict.fromkeys((rank - distance * step) % size for step in range(1, count + 1)))


def make_slots(layout: AreaLayout, replicas: int, group: ProcessGroup, shared: bool) -> Slots:
    """The slots of a group, in shared memory if ``shared`` and if possible. Collective."""
    slots = _shared_slots(layout, group) if shared else None
    return PeerSlots(layout, group.rank(), replicas) if slots is None else slots


def _shared_slots(layout: AreaLayout, group: ProcessGroup) -> SharedSlots | None:
    rank = group.rank()
    own = NO_MEMORY_FILE
    with contextlib.suppress(OSError):  # the system has no memory files
        own = MemoryFile.create("slots")

    def prepare() -> tuple[int, int, str]:
        if own.fd >= 0:
            os.ftruncate(own.fd, layout.area(rank))
            os.pwrite(own.fd, _STAMP.pack(_NEVER, 0) * SLOTS, 0)
        return own.pid, own.fd, own.name

    fds: list[int] = []
    try:
        fds = [MemoryFile(*offer).open(os.O_RDWR) for offer in agree(prepare, group)]
        # After this agreement every rank has all files open.
        if not all(agree(lambda: min(fds) >= 0, group)):
            return None
        slots, fds = SharedSlots(layout, rank, fds), []
        return slots
    finally:
        for fd in (own.fd, *fds):
            if fd >= 0:
                os.close(fd)
