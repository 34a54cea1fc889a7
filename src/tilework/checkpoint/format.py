"""The index of a checkpoint as values: its files, its tensors and where their parts lie.

See docs/format.md. ``index_text`` writes an index as JSON, and reads and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilework.checkpoint.picture import checkpoint_lines, summary
from tilework.checkpoint.saved import SavedFile, SavedTensor
from tilework.tiled.html import WIDTH, lines_html

#: The name of the index's file: a folder is a checkpoint if it has one.
INDEX_NAME = "index.json"
#: The index that is being replaced, for as long as the new one may be torn.
PREVIOUS_NAME = f"{INDEX_NAME}.previous"
#: The names that :func:`~tilework.checkpoint.convert` has for formats.
FORMATS = ("tilework", "safetensors", "dcp", "torch")
FORMAT_NAME = "tilework.checkpoint"
VERSION = 1
#: The bytes that each checksum is of, counted from where a part begins; the last has fewer.
CHUNK_BYTES = 1 << 20
#: An index is JSON of so many levels at the most.
MOST_DEPTH = 200

#: The keys of dicts and the positions in lists that lead from the state to one value.
Path = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
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

    def __str__(self) -> str:
        told = summary(self.tensors.values(), len(self.files), self.world_size)
        return f"{told} at {self.created}" if self.created else told

    def __repr__(self) -> str:
        return f"Index({self})"

    def _repr_html_(self) -> str:
        tensors = list(self.tensors.values())
        return lines_html(checkpoint_lines(str(self), self.meta, tensors, WIDTH))


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """The number of checksums of so many bytes.

    Example:
        >>> chunk_count(5, 4), chunk_count(0, 4)
        (2, 0)
    """
    return -(-nbytes // chunk_bytes)
