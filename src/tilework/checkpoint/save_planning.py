"""Plans of saving: the boxes that each rank writes, and their places in files. Pure.

Every rank makes the same plan from the same description; nothing is communicated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilework.checkpoint.format import TensorForm, stored
from tilework.checkpoint.index_text import RESERVED_KEY, file_keys
from tilework.checkpoint.no_collections import no_collections
from tilework.layout import Box
from tilework.layout.internal import with_span

#: The default maximum of bytes of a file, and therefore of a part.
FILE_BYTES = 4 << 30
#: Smaller boxes are not split to balance ranks.
_SPLIT_BYTES = 256 << 10
#: Elements begin at multiples of this in a file, so that memory maps are aligned.
_ALIGNMENT = 64


def check_file_bytes(file_bytes: int) -> None:
    """Raise ValueError unless a file's maximum of bytes of elements is an integer of at least 1."""
    if not isinstance(file_bytes, int) or file_bytes < 1:
        raise ValueError(f"file_bytes must be a number of bytes, 1 or more, got {file_bytes!r}")


@dataclass(frozen=True, slots=True)
class TensorToSave(TensorForm):
    """The description of a tensor to save: boxes, each with the global ranks that hold it."""

    tiles: tuple[tuple[Box, tuple[int, ...]], ...]
    layout: str = ""


class BoxToWrite(NamedTuple):
    """A box that one rank writes. ``tensor`` counts the saved tensors."""

    tensor: int
    box: Box
    nbytes: int


@no_collections()
def assign_writers(
    tensors: Sequence[TensorToSave], ranks: Sequence[int]
) -> dict[int, list[BoxToWrite]]:
    """The boxes that each rank writes: each element once, with bytes balanced between ranks.

    If a single rank holds a box, this rank writes it. Boxes that several ranks hold are dealt out
    among these ranks, and split where that balances the bytes. Takes time proportional to the
    number of boxes.
    """
    written: dict[int, list[BoxToWrite]] = {rank: [] for rank in ranks}
    loads = dict.fromkeys(ranks, 0)
    shared: dict[tuple[int, ...], list[BoxToWrite]] = {}
    for number, tensor in enumerate(tensors):
        itemsize = tensor.itemsize
        for box, owners in tensor.tiles:
            nbytes = math.prod(box.sizes) * itemsize
            task = BoxToWrite(number, box, nbytes)
            if len(owners) > 1:
                shared.setdefault(tuple(sorted(owners)), []).append(task)
                continue
            owner = owners[0]
            if owner not in loads:
                _refuse_owner(tensor, box, owners, ranks)
            written[owner].append(task)
            loads[owner] += nbytes
    for owners in sorted(shared, key=lambda owners: (len(owners), owners)):
        here = [rank for rank in owners if rank in loads]
        if not here:
            first = shared[owners][0]
            _refuse_owner(tensors[first.tensor], first.box, owners, ranks)
        for rank, task in _dealt(shared[owners], _quotas(shared[owners], here, loads), tensors):
            written[rank].append(task)
            loads[rank] += task.nbytes
    return written


def _refuse_owner(
    tensor: TensorToSave, box: Box, owners: Sequence[int], ranks: Sequence[int]
) -> None:
    raise ValueError(
        f"tensor {tensor.name!r} has {box} on ranks {list(owners)}, which are not among those that "
        f"save, {list(ranks)}: save on a group that has them"
    )


def _quotas(
    tasks: Sequence[BoxToWrite], owners: Sequence[int], loads: dict[int, int]
) -> list[tuple[int, int]]:
    left = sum(task.nbytes for task in tasks)
    ordered = sorted(owners, key=lambda rank: (loads[rank], rank))
    level = 0
    for count in range(1, len(ordered) + 1):
        level = (left + sum(loads[each] for each in ordered[:count])) // count
        if count == len(ordered) or level <= loads[ordered[count]]:
            ordered = ordered[:count]
            break
    return [(rank, max(0, level - loads[rank])) for rank in ordered]


def _dealt(
    tasks: Sequence[BoxToWrite], quotas: Sequence[tuple[int, int]], tensors: Sequence[TensorToSave]
) -> Iterator[tuple[int, BoxToWrite]]:
    """Deal tasks out to ranks: one rank's quota is filled before the next rank's."""
    turn, room = 0, quotas[0][1]
    for task in tasks:
        rest: BoxToWrite | None = task
        while rest is not None:
            rank = quotas[turn][0]
            last = turn == len(quotas) - 1
            if last or rest.nbytes <= room:
                yield rank, rest
                room -= rest.nbytes
                break
            head, rest = _split(rest, room, tensors[rest.tensor].itemsize)
            if head is not None:
                yield rank, head
            turn += 1
            room = quotas[turn][1] if head is not None else quotas[turn][1] + max(0, room)


def _split(
    task: BoxToWrite, room: int, itemsize: int
) -> tuple[BoxToWrite | None, BoxToWrite | None]:
    """Split a task into what fits in ``room`` bytes and the rest; None for either if empty."""
    box = task.box
    if task.nbytes >= _SPLIT_BYTES:
        dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
        if dim is not None:
            row = task.nbytes // box.sizes[dim]
            rows = min(box.sizes[dim], (room + row // 2) // row)
            if rows == 0:
                return None, task
            head, tail = _cut_at(box, dim, rows)
            rest = BoxToWrite(task.tensor, tail, tail.volume * itemsize)
            return BoxToWrite(task.tensor, head, rows * row), rest if tail.volume else None
    return (task, None) if 2 * room >= task.nbytes else (None, task)


def _cut_at(box: Box, dim: int, rows: int) -> tuple[Box, Box]:
    start, size = box.offsets[dim], box.sizes[dim]
    return with_span(box, dim, start, rows), with_span(box, dim, start + rows, size - rows)


def cut_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most_bytes`` bytes, or of a single element."""
    if box.volume * itemsize <= most_bytes or box.volume <= 1:
        yield box
        return
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    row = box.volume // box.sizes[dim] * itemsize
    rows = max(1, most_bytes // row)
    rest = box
    while rest.sizes[dim] > rows:
        head, rest = _cut_at(rest, dim, rows)
        yield from cut_box(head, itemsize, most_bytes)
    yield from cut_box(rest, itemsize, most_bytes)


class PlacedBox(NamedTuple):
    """A box, and the place in a file to write the bytes to. ``tensor`` counts the saved tensors."""

    tensor: int
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FilePlan:
    """A file that one rank writes: the header of safetensors, then the boxes in order."""

    name: str
    header: bytes
    boxes: tuple[PlacedBox, ...]
    nbytes: int


@no_collections()
def plan_files(
    tensors: Sequence[TensorToSave],
    tasks: Sequence[BoxToWrite],
    prefix: str,
    file_bytes: int = FILE_BYTES,
) -> list[FilePlan]:
    """Plan the files of one rank. Larger boxes are split; boxes without elements are in no file."""
    files: list[list[BoxToWrite]] = []
    used = file_bytes
    for task in tasks:
        itemsize = tensors[task.tensor].itemsize
        fits = task.nbytes <= file_bytes
        for box in (task.box,) if fits else cut_box(task.box, itemsize, file_bytes):
            nbytes = box.volume * itemsize
            if not nbytes:
                continue
            if used + nbytes > file_bytes:
                files.append([])
                used = 0
            files[-1].append(BoxToWrite(task.tensor, box, nbytes))
            used += nbytes
    return [
        _file_plan(tensors, boxes, f"{prefix}-{number:05}.safetensors")
        for number, boxes in enumerate(files)
    ]


def _file_plan(tensors: Sequence[TensorToSave], boxes: Sequence[BoxToWrite], name: str) -> FilePlan:
    # Long elements first, to align all without gaps, which the format forbids.
    ordered = sorted(boxes, key=lambda task: -_stored_itemsize(tensors[task.tensor]))
    keys = file_keys((tensors[t.tensor].name, tensors[t.tensor].shape, t.box) for t in ordered)
    header, offsets = packed_file(
        (key, *stored(tensors[t.tensor].dtype, t.box.sizes), t.nbytes)
        for key, t in zip(keys, ordered, strict=True)
    )
    placed = [
        PlacedBox(task.tensor, task.box, offset, task.nbytes)
        for task, offset in zip(ordered, offsets, strict=False)
    ]
    return FilePlan(name, header, tuple(placed), offsets[-1])


def _stored_itemsize(tensor: TensorToSave) -> int:
    _, sizes = stored(tensor.dtype, ())
    return tensor.itemsize // math.prod(sizes)


def packed_file(entries: Iterable[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, for (key, dtype, shape, bytes) of each tensor in order, and
    the position of each tensor; last, the file's end.
    """
    header: dict[str, object] = {RESERVED_KEY: {"format": "pt"}}
    begins = [0]
    for key, dtype, shape, nbytes in entries:
        begin, end = begins[-1], begins[-1] + nbytes
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begins.append(end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    return start, [len(start) + begin for begin in begins]
