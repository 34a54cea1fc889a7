"""The index of a checkpoint as values: files, tensors and the places of their parts.

See docs/format.md. ``index_text`` writes an index as JSON, and reads and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilework.checkpoint.picture import checkpoint_parts, summary
from tilework.checkpoint.saved import SavedFile, SavedTensor
from tilework.show import Page

#: The name of the index file: a folder with an index is a checkpoint.
INDEX_NAME = "index.json"
#: The name of the old index, as long as the new index may be torn.
PREVIOUS_NAME = f"{INDEX_NAME}.previous"
#: The names of formats for :func:`~tilework.checkpoint.convert`.
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
        tensors: The tensors by name, in the order of the state.
        files: The files by name.
        state: The JSON of the state, with names in the place of tensors; see ``state_json``.
        world_size: The number of ranks that saved the checkpoint.
        chunk_bytes: The number of bytes that one checksum is of.
        meta: The program's additions: plain JSON.
        created: The time of creation, in UTC, in ISO 8601.
        writer: The program that wrote the checkpoint.
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
    """The number of checksums for ``nbytes`` bytes: one for each begun chunk.

    Example:
        >>> chunk_count(5, 4), chunk_count(0, 4)
        (2, 0)
    """
    return -(-nbytes // chunk_bytes)
