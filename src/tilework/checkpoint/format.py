"""The index of a checkpoint as values: files, tensors and the places of their parts.

See docs/format.md. ``index_text`` writes an index as JSON, and reads and checks it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilework.layout import Box
from tilework.show import Page, Picture, Styled, TextTable, bytes_text, colour, count_text

#: torch's dtypes by the bytes of an element, each with the index's name: safetensors', where it has
#: one.
_DTYPES = {
    1: "BOOL bool, U8 uint8, I8 int8, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, "
    "F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz",
    2: "I16 int16, U16 uint16, F16 float16, BF16 bfloat16",
    4: "I32 int32, U32 uint32, F32 float32",
    8: "I64 int64, U64 uint64, F64 float64, C64 complex64",
    16: "C128 complex128",
}
_PAIRS = [(n, pair.split()) for n, pairs in _DTYPES.items() for pair in pairs.split(", ")]
#: By the index's name: the bytes of an element, and torch's name.
ITEM_BYTES = {name: nbytes for nbytes, (name, _) in _PAIRS}
TORCH_NAMES = {name: theirs for _, (name, theirs) in _PAIRS}
#: The substitutes in files for dtypes that not every reader of safetensors knows: another dtype,
#: and how many elements of it stand for one element.
_STORED = {
    "C64": ("F32", 2),
    "C128": ("F64", 2),
    "F8_E4M3FNUZ": ("U8", 1),
    "F8_E5M2FNUZ": ("U8", 1),
}


def stored(dtype: str, sizes: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The dtype and the sizes that a safetensors file has for elements of the index's dtype."""
    name, count = _STORED.get(dtype, (dtype, 1))
    return name, (*sizes, count) if count > 1 else tuple(sizes)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor whose elements lie in row-major order in one file.

    ``crc32`` has the CRC-32 of each chunk of the elements.
    """

    box: Box
    file: str
    offset: int
    nbytes: int
    crc32: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class SavedTensor(TensorForm):
    """A tensor of a checkpoint.

    Args:
        layout: The sharding at the time of saving, for people; empty without sharding.
    """

    parts: tuple[Part, ...]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint: the length, and the CRC-32 of the bytes before the first element."""

    nbytes: int
    header_crc32: int


#: The maximum of tensors and of layouts to show without names.
LISTED, DRAWN = 200, 4
_RANK = re.compile(r"-rank0*([0-9]+)-")


def summary(tensors: Iterable[SavedTensor], files: int, ranks: int) -> str:
    """The tensors, bytes, files and ranks of a checkpoint in a line."""
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
    """The CRC-32 of a tensor's checksums; ``"none"`` without any, as in published weights."""
    if not any(any(part.crc32) for part in tensor.parts):
        return "none"
    sums = b"".join(crc.to_bytes(4, "little") for part in tensor.parts for crc in part.crc32)
    return f"{zlib.crc32(sums):08x}"


def _pictures(tensors: Sequence[SavedTensor], most: int) -> Iterator[str | Styled | Picture]:
    layouts: dict[tuple[object, ...], list[SavedTensor]] = {}
    for tensor in tensors:
        if len(tensor.parts) > 1 and tensor.shape:
            key = (tensor.shape, tuple(part.box for part in tensor.parts), tensor.layout)
            layouts.setdefault(key, []).append(tensor)
    for alike in list(layouts.values())[:most]:
        first = alike[0]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        writers = [m[1] if (m := _RANK.search(part.file)) else "?" for part in first.parts]
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


#: The name of the index file: a folder with an index is a checkpoint.
INDEX_NAME = "index.json"
#: The name of the old index, as long as the new index may be torn.
PREVIOUS_NAME = f"{INDEX_NAME}.previous"
FORMATS = ("tilework", "safetensors", "dcp", "torch")
FORMAT_NAME = "tilework.checkpoint"
VERSION = 1
#: The bytes of each checksum, counted from the begin of a part; the last may have fewer.
CHUNK_BYTES = 1 << 20
#: The maximum of levels of JSON in an index.
MOST_DEPTH = 200

#: The keys of dicts and the positions in lists that lead from the state to one value.
Path = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Index:
    """The description of a checkpoint's files.

    Args:
        state: The JSON of the state, with names in the place of tensors; see ``state_json``.
        chunk_bytes: The number of bytes that one checksum is of.
        meta: The program's additions: plain JSON.
        created: The time of creation, in UTC, in ISO 8601.
    """

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]
    state: Any = None
    world_size: int = 1
    chunk_bytes: int = CHUNK_BYTES
    meta: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    writer: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of all files except the index."""
        return sum(file.nbytes for file in self.files.values())

    def __str__(self) -> str:
        told = summary(self.tensors.values(), len(self.files), self.world_size)
        return f"{told} at {self.created}" if self.created else told

    def __repr__(self) -> str:
        return f"Index({self})"

    def _repr_html_(self) -> str:
        tensors = list(self.tensors.values())
        return Page(*checkpoint_parts(str(self), self.meta, tensors)).html()


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """The number of checksums for ``nbytes`` bytes: one for each begun chunk."""
    return -(-nbytes // chunk_bytes)
