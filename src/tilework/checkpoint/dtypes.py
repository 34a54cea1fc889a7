"""Dtypes in checkpoints: their names in the index, and as what safetensors files hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: By the index's name. The names are those of safetensors, where it has one.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: As what a file holds a dtype that not every reader of safetensors knows: another dtype, and how
#: many elements of it stand for one.
_STORED = {
    "C64": ("F32", 2),
    "C128": ("F64", 2),
    "F8_E4M3FNUZ": ("U8", 1),
    "F8_E5M2FNUZ": ("U8", 1),
}


def dtype_name(dtype: torch.dtype, where: str = "a tensor") -> str:
    """The index's name of a dtype.

    Args:
        dtype: The dtype.
        where: Names the tensor in the error.

    Raises:
        TypeError: Checkpoints cannot hold it.

    Example:
        >>> dtype_name(torch.bfloat16)
        'BF16'
    """
    name = NAMES.get(dtype)
    if name is None:
        raise TypeError(
            f"{where} has dtype {dtype}, which a checkpoint cannot hold; it holds "
            f"{', '.join(str(known).removeprefix('torch.') for known in NAMES)}"
        )
    return name


def stored(dtype: str, sizes: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The dtype and the sizes that a safetensors file has for elements of the index's dtype.

    Example:
        >>> stored("C64", (3,)), stored("F16", (3,))
        (('F32', (3, 2)), ('F16', (3,)))
    """
    name, count = _STORED.get(dtype, (dtype, 1))
    return name, (*sizes, count) if count > 1 else tuple(sizes)
