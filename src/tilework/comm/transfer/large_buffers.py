"""Memory for large results: reused, and in huge pages if the kernel has them.

At the first write to a page the kernel finds and clears it. With pages of 4 KiB that takes about as
long as moving the data into them. So the memory of large results that are gone serves later results
of about the same size. That memory is bounded; it is marked as free for the kernel to take
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

from tilework.comm.per_call.call_recorder import recorded

#: Smaller tensors come from memory that the process already has.
LARGE_BYTES = 4 << 20
#: The most memory that is kept for the next results.
KEPT_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20

_KINDS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else 0

#: Free blocks, the oldest first. Finalizers append at any time in any thread: a deque needs no lock
#: for that.
_free: deque[mmap.mmap] = deque()


@recorded
def empty_tensor(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised, contiguous tensor. From LARGE_BYTES on, the storage cannot be resized."""
    nbytes = math.prod(sizes) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_BYTES or sys.platform != "linux":
        return torch.empty(tuple(sizes), dtype=dtype, device=device)
    block = _suitable_block(nbytes) or _new_block(nbytes)
    to_huge_page = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _HUGE_PAGE
    memory = (ctypes.c_char * nbytes).from_buffer(block, to_huge_page)
    # The storage keeps the block; the tensor's last view releases it.
    weakref.finalize(memory, _release, block).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))


def _new_block(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE, _KINDS)
    _advise(block, "MADV_HUGEPAGE")
    return block


def _advise(block: mmap.mmap, advice: str) -> None:
    # A kernel that does not know the advice refuses it, which does no harm.
    with contextlib.suppress(OSError, AttributeError):
        block.madvise(getattr(mmap, advice))


def _suitable_block(nbytes: int) -> mmap.mmap | None:
    """A free block of suitable size, or None; gives the other free blocks back."""
    suitable = None
    while (block := _oldest()) is not None:
        room = len(block) - _HUGE_PAGE
        if suitable is None and nbytes <= room <= nbytes + nbytes // 4 + _HUGE_PAGE:
            suitable = block
    return suitable


def _release(block: mmap.mmap) -> None:
    _advise(block, "MADV_FREE")
    _free.append(block)
    while sum(len(each) for each in tuple(_free)) > KEPT_BYTES:
        _oldest()


def _oldest() -> mmap.mmap | None:
    try:
        return _free.popleft()
    except IndexError:
        return None
