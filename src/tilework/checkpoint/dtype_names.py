"""Names of dtypes in checkpoints, with sizes, and their forms in safetensors files."""

from __future__ import annotations

from collections.abc import Sequence

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
