"""Files of a checkpoint, and tensors in parts of them. See docs/format.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilework.layout import Box

#: The bytes of an element, by the index's name of the dtype: the name is safetensors', where it has
#: one.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
    "C128": 16,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
}
#: The substitutes in files for dtypes that not every reader of safetensors knows: another dtype,
#: and how many elements of it stand for one element.
_STORED = {
    "C64": ("F32", 2),
    "C128": ("F64", 2),
    "F8_E4M3FNUZ": ("U8", 1),
    "F8_E5M2FNUZ": ("U8", 1),
}


def stored(dtype: str, sizes: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The dtype and the sizes that a safetensors file has for elements of the index's dtype.

    Example:
        >>> stored("C64", (3,)), stored("F16", (3,))
        (('F32', (3, 2)), ('F16', (3,)))
    """
    name, count = _STORED.get(dtype, (dtype, 1))
    return name, (*sizes, count) if count > 1 else tuple(sizes)


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
