"""The tensors of a checkpoint in styled lines: a table, and a picture of each layout."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tilework.checkpoint.saved import SavedTensor
from tilework.tiled import COLOURS, PictureSize, StyledLine, bytes_text, coloured_picture, draw

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

    def count(number: int, what: str) -> str:
        return f"{number:,} {what}{'s' * (number != 1)}"

    return (
        f"{count(len(tensors), 'tensor')}, {bytes_text(bytes_of(tensors))} in "
        f"{count(files, 'file')}, saved by {count(ranks, 'rank')}"
    )


def bytes_of(tensors: Iterable[SavedTensor]) -> int:
    """The number of bytes of tensors; bytes that tied tensors share count once."""
    parts = {(p.file, p.offset): p.nbytes for t in tensors for p in t.parts}
    return sum(parts.values())


def checkpoint_lines(
    headline: str,
    meta: Mapping[str, Any],
    tensors: Sequence[SavedTensor],
    width: int,
    most_listed: int = LISTED,
    most_drawn: int = DRAWN,
) -> Iterator[StyledLine]:
    """The headline, the program's additions, a row for each tensor, and pictures of layouts."""
    yield [(headline, "bold")]
    if meta:
        yield [(f"meta: {dict(meta)}", "")]
    yield []
    listed = tensors[:most_listed]
    rows = [("tensor", "dtype", "shape", "bytes", "parts", "checksum"), *map(_row, listed)]
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        words = [
            word.rjust(size) if at in (3, 4) else word.ljust(size)
            for at, (word, size) in enumerate(zip(row, columns, strict=True))
        ]
        yield [("  ".join(words).rstrip(), "bold" if number == 0 else "")]
    if len(tensors) > len(listed):
        yield [(f"… and {len(tensors) - len(listed):,} more: name them to see them", "")]
    yield from _pictures(tensors, most_drawn, width)


def _row(tensor: SavedTensor) -> tuple[str, ...]:
    return (
        tensor.name,
        tensor.dtype,
        str(list(tensor.shape)),
        bytes_text(tensor.nbytes),
        str(len(tensor.parts)),
        checksum(tensor),
    )


def checksum(tensor: SavedTensor) -> str:
    """The CRC-32 of a tensor's checksums: equal for the same elements in the same parts.

    ``"none"`` if the tensor has no checksums, as in published weights.
    """
    if not any(any(part.crc32) for part in tensor.parts):
        return "none"
    sums = b"".join(crc.to_bytes(4, "little") for part in tensor.parts for crc in part.crc32)
    return f"{zlib.crc32(sums):08x}"


def _pictures(tensors: Sequence[SavedTensor], most: int, width: int) -> Iterable[StyledLine]:
    """Pictures of the ways in which tensors are cut into parts, as lines of text.

    Tensors with the same shape and parts share a picture. The line above it has the first tensor's
    name and the number of the others. A tensor in one part has no picture.

    Args:
        tensors: The tensors of a checkpoint.
        most: The largest number of pictures; a line counts the layouts that are left out.
        width: The width of a line, in characters.
    """
    layouts: dict[tuple[object, ...], list[SavedTensor]] = {}
    for tensor in tensors:
        if len(tensor.parts) > 1 and tensor.shape:
            key = (tensor.shape, tuple(part.box for part in tensor.parts), tensor.layout)
            layouts.setdefault(key, []).append(tensor)
    for alike in list(layouts.values())[:most]:
        first = alike[0]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        writers = [_writer(part.file) for part in first.parts]
        yield []
        yield [(f"{first.name}{more}: {list(first.shape)}", "bold")]
        if first.layout:
            yield [(first.layout, "")]
        lines = draw(
            first.shape,
            [part.box for part in first.parts],
            [[f"rank {writer}", writer] for writer in writers],
            PictureSize(width, 14, 12, 4),
        )
        yield from coloured_picture(lines, lambda at, w=writers: _colour(w[at]))  # type: ignore[misc]
    if len(layouts) > most:
        yield []
        yield [(f"… and {len(layouts) - most} more layouts: name tensors to see theirs", "")]


def _writer(file: str) -> str:
    match = _RANK.search(file)
    return match[1] if match else "?"


def _colour(writer: str) -> str:
    return COLOURS[int(writer) % len(COLOURS)] if writer.isdecimal() else COLOURS[0]
