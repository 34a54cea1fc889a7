"""Dtypes in checkpoints, by their names in the index."""

from __future__ import annotations

import torch

#: The dtypes of ``saved``.
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


def dtype_name(dtype: torch.dtype, where: str = "a tensor") -> str:
    """The index's name of a dtype.

    Args:
        dtype: The dtype.
        where: Names the tensor in the error.

    Raises:
        TypeError: Checkpoints cannot hold the dtype.

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
