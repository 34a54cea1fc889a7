"""The tensors of a checkpoint as parts of a page: a table, and a picture of each layout."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tilework.checkpoint.saved import SavedTensor
from tilework.show import Picture, Styled, TextTable, bytes_text, colour, count_text

#: The maximum of tensors and of layouts to show without names.
LISTED, DRAWN = 200, 4
_RANK = re.compile(r"-rank0*([0-9]+)-")


def summary(tensors: Iterable[SavedTensor], files: int, ranks: int) -> str:
    """The tensors, bytes, files and ranks of a checkpoint in a line.

    Example:
        >>> summary([], 0, 1)
        '0 tensors, 0 B in 0 files, saved by 1 rank'
    """
    tensors = list(tensors)
    size = bytes_text(bytes_of(tensors))
    return (
        f"{count_text(len(tensors), 'tensor')}, {size} in {count_text(files, 'file')}, "
        f"saved by {count_text(ranks, 'rank')}"
    )


def bytes_of(tensors: Iterable[SavedTensor]) -> int:
    """The number of bytes of tensors; bytes that tied tensors share count once."""
    parts = {(p.file, p.offset): p.nbytes for t in tensors for p in t.parts}
    return sum(parts.values())


def checkpoint_parts(
    headline: str,
    meta: Mapping[str, Any],
    tensors: Sequence[SavedTensor],
    most_listed: int = LISTED,
    most_drawn: int = DRAWN,
) -> Iterator[str | Styled | Picture | TextTable]:
    """The headline, the program's additions, a row for each tensor, and pictures of layouts."""
    yield headline, "bold"
    if meta:
        yield f"meta: {dict(meta)}"
    yield ""
    titles = ("tensor", "dtype", "shape", "bytes", "parts", "checksum")
    rows = [
        (t.name, t.dtype, str([*t.shape]), bytes_text(t.nbytes), str(len(t.parts)), checksum(t))
        for t in tensors[:most_listed]
    ]
    yield TextTable(titles, rows, {3, 4})
    if len(tensors) > most_listed:
        yield f"… and {len(tensors) - most_listed:,} more: name them to see them"
    yield from _pictures(tensors, most_drawn)


def checksum(tensor: SavedTensor) -> str:
    """The CRC-32 of a tensor's checksums: equal for the same elements in the same parts.

    ``"none"`` if the tensor has no checksums, as in published weights.
    """
    if not any(any(part.crc32) for part in tensor.parts):
        return "none"
    sums = b"".join(crc.to_bytes(4, "little") for part in tensor.parts for crc in part.crc32)
    return f"{zlib.crc32(sums):08x}"


def _pictures(tensors: Sequence[SavedTensor], most: int) -> Iterator[str | Styled | Picture]:
    """At most ``most`` pictures of cuts into parts, shared by tensors of equal parts."""
    layouts: dict[tuple[object, ...], list[SavedTensor]] = {}
    for tensor in tensors:
        if len(tensor.parts) > 1 and tensor.shape:
            key = (tensor.shape, tuple(part.box for part in tensor.parts), tensor.layout)
            layouts.setdefault(key, []).append(tensor)
    for alike in list(layouts.values())[:most]:
        first = alike[0]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        writers = [_writer(part.file) for part in first.parts]
        yield ""
        yield f"{first.name}{more}: {list(first.shape)}", "bold"
        if first.layout:
            yield first.layout
        labels = [[f"rank {writer}", writer] for writer in writers]
        colours = [colour(int(writer) if writer.isdecimal() else 0) for writer in writers]
        yield Picture(first.shape, [part.box for part in first.parts], labels, colours)
    if len(layouts) > most:
        yield ""
        yield f"… and {len(layouts) - most} more layouts: name tensors to see theirs"


def _writer(file: str) -> str:
    match = _RANK.search(file)
    return match[1] if match else "?"
