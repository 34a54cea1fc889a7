"""New memory for results, in huge pages where the kernel has them for those who ask.

The first write to a page of a large tensor has the kernel find and clear it: with pages of 4 KiB
that takes about as long as moving what comes into them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

#: Smaller tensors come from memory that the process already has.
_LARGE_BYTES = 4 << 20
_MADV_HUGEPAGE = 14


def fresh(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised, contiguous tensor.

    Example:
        >>> fresh((2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    tensor = torch.empty(tuple(sizes), dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _LARGE_BYTES and sys.platform == "linux":
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        # A kernel without huge pages refuses, and that is all.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


_libc = ctypes.CDLL(None)
