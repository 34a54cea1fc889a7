"""Files of a checkpoint, and tensors in parts of them. See docs/format.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilework.checkpoint.dtype_names import ITEM_BYTES
from tilework.layout import Box


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor whose elements lie in row-major order in one file.

    Args:
        box: The region of the tensor.
        file: The file's name.
        offset: The position of the first byte in the file.
        nbytes: The number of bytes of the elements.
        crc32: The CRC-32 of each chunk of the elements.
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
        name: The name, unique in the checkpoint.
        dtype: The index's name of the dtype.
        shape: The global shape.
        parts: Parts that cover the shape, each element once.
        layout: The sharding at the time of saving, for people; empty without sharding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layout: str = ""

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint.

    Args:
        nbytes: The length of the file.
        header_crc32: The CRC-32 of the bytes before the first element.
    """

    nbytes: int
    header_crc32: int
