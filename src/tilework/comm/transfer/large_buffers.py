"""Memory for large results, used again and in huge pages where the kernel has them.

The first write to a page has the kernel find and clear it: with pages of 4 KiB that takes about as
long as moving what comes into them. So the memory of large results that nobody has any more serves
the next ones of about that size. It is bounded, marked as free for the kernel to take meanwhile
(MADV_FREE), and dropped when a result comes that it does not suit.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

#: Smaller tensors come from memory that the process already has.
LARGE_BYTES = 4 << 20
#: The most memory that is kept for the next results.
KEPT_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20

_KINDS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else 0

#: Nobody's, the oldest first. Appended to by finalizers, which run at any time in any thread: a
#: deque needs no lock for that.
_unused: deque[mmap.mmap] = deque()


def fresh(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised, contiguous tensor. A large one's storage cannot be resized.

    Example:
        >>> fresh((2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    nbytes = math.prod(sizes) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_BYTES or sys.platform != "linux":
        return torch.empty(tuple(sizes), dtype=dtype, device=device)
    block = _unused_block(nbytes) or _new_block(nbytes)
    memory = (ctypes.c_char * nbytes).from_buffer(block, _aligned(block))
    # What torch is given keeps the block; the tensor's last view lets it go.
    weakref.finalize(memory, _put_by, block).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))


def _new_block(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE, _KINDS)
    _advise(block, "MADV_HUGEPAGE")
    return block


def _advise(block: mmap.mmap, advice: str) -> None:
    # A kernel that does not know it refuses, and that is all.
    with contextlib.suppress(OSError, AttributeError):
        block.madvise(getattr(mmap, advice))


def _aligned(block: mmap.mmap) -> int:
    """Where the block's first huge page begins."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _HUGE_PAGE


def _unused_block(nbytes: int) -> mmap.mmap | None:
    """A block that suits; those that do not are given back to the kernel."""
    found = None
    while (block := _oldest()) is not None:
        room = len(block) - _HUGE_PAGE
        if found is None and nbytes <= room <= nbytes + nbytes // 4 + _HUGE_PAGE:
            found = block
    return found


def _put_by(block: mmap.mmap) -> None:
    _advise(block, "MADV_FREE")
    _unused.append(block)
    while sum(len(each) for each in tuple(_unused)) > KEPT_BYTES:
        _oldest()


def _oldest() -> mmap.mmap | None:
    try:
        return _unused.popleft()
    except IndexError:
        return None
