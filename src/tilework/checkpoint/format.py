"""The index of a checkpoint as values: its files, its tensors and where their parts lie.

See docs/format.md. ``index_text`` writes an index as JSON, and reads and checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilework.checkpoint.dtypes import DTYPES
from tilework.layout import Box

#: The name of the index's file: a folder is a checkpoint if it has one.
INDEX_NAME = "index.json"
#: The index that is being replaced, for as long as the new one may be torn.
PREVIOUS_NAME = f"{INDEX_NAME}.previous"
FORMAT_NAME = "tilework.checkpoint"
VERSION = 1
#: The bytes that each checksum is of, counted from where a part begins; the last has fewer.
CHUNK_BYTES = 1 << 20
#: An index is JSON of so many levels at the most.
MOST_DEPTH = 200

#: The keys of dicts and the positions in lists that lead from the state to one value.
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, in row-major order in one file.

    Args:
        box: The region of the tensor.
        file: The file's name.
        offset: The byte of the file at which the elements begin.
        nbytes: Their length.
        crc32: The CRC-32 of each chunk of them.
    """

    box: Box
    file: str
    offset: int
    nbytes: int
    crc32: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Args:
        name: Its name, unique in the checkpoint.
        dtype: The index's name of the dtype.
        shape: The global shape.
        parts: They cover the shape, each element once.
        layout: How it was sharded when it was saved, for people; empty if it was not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layout: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint.

    Args:
        nbytes: Its length.
        header_crc32: The CRC-32 of the bytes before the first element.
    """

    nbytes: int
    header_crc32: int


@dataclass(frozen=True)
class Index:
    """All that a checkpoint says about its files.

    Args:
        tensors: By name, in the order of the state.
        files: By name.
        state: The state, with names in the place of tensors; see ``state_json``.
        world_size: The number of ranks that saved it.
        chunk_bytes: The bytes that each checksum is of.
        meta: What the program adds: plain JSON.
        created: When it was made, in UTC, as ISO 8601 has it.
        writer: The program that made it.
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
        """The bytes of all files but the index."""
        return sum(file.nbytes for file in self.files.values())


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """The number of checksums of so many bytes.

    Example:
        >>> chunk_count(5, 4), chunk_count(0, 4)
        (2, 0)
    """
    return -(-nbytes // chunk_bytes)
