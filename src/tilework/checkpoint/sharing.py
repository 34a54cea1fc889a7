"""Shared parts of local files: each rank of a host checks some chunks, and copies its regions.

Bytes that one rank has read are in the system's pages of the file. The other ranks map these pages,
and nothing is sent. No rank waits for another; at the end all learn if their bytes were whole.
Ranks go through parts in the same order, so that bytes checked by one rank are often in a cache for
the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilework.checkpoint.format import chunk_count
from tilework.checkpoint.host_load import HostLoad
from tilework.checkpoint.load_planning import LoadPlan, Wanted


def read_shared(load: HostLoad) -> None:
    """Check this rank's chunks of shared parts, and fill the regions that it needs. Local.

    Raises:
        CheckpointError: Some of the chunks that this rank checks are damaged.
    """
    rank, reader = load.rank, load.reader
    own = _own_chunks(load.plan, rank, load.wanted, reader.index.chunk_bytes)
    with reader.together():
        for number, part, needs in load.plan.shared:
            tensor = load.wanted[number].saved
            checked = bytes(own[number, part.file, part.offset])
            boxes = [need for need in needs if rank in need.ranks]
            for need in boxes:
                target = load.targets.place(number, part, need)
                reader.read_shared_box(tensor, part, need.box, target, checked)
                checked = bytes(len(checked))
            if not boxes:
                reader.read_shared_box(tensor, part, None, None, checked)


def _own_chunks(
    plan: LoadPlan, rank: int, wanted: Sequence[Wanted], chunk: int
) -> dict[tuple[int, str, int], bytearray]:
    """By (tensor, file, offset) of a shared part, a byte per chunk: 1 if ``rank`` checks it."""
    own = {
        (number, part.file, part.offset): bytearray(chunk_count(part.nbytes, chunk))
        for number, part, _ in plan.shared
    }
    for unit in plan.units[rank]:
        itemsize = wanted[unit.tensor].saved.itemsize
        first, last = unit.start * itemsize // chunk, -(-unit.stop * itemsize // chunk)
        flags = own[unit.tensor, unit.part.file, unit.part.offset]
        flags[first:last] = b"\1" * (last - first)
    return own
