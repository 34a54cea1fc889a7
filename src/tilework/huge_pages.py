"""Huge pages: what the kernel offers, and whether tensors ask for them.

A page of 2 MiB instead of 512 small ones is found, cleared and read by peers in less time. The
kernel gives them to all memory, to memory that asks (madvise), or to none. torch's large tensors
ask, if THP_MEM_ALLOC_ENABLE is set before a process makes the first tensor.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

#: Has torch ask for huge pages for tensors of 2 MiB and more, if "1".
VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
_FOLDER: Final = Path("/sys/kernel/mm/transparent_hugepage")


def offered(kind: str = "enabled", folder: Path = _FOLDER) -> str:
    """The kernel's policy: ``always``, ``madvise`` or ``never``; "" if there is none. Of memory
    that ranks share: ``kind`` ``shmem_enabled``, with ``advise`` and others.
    """
    try:
        chosen = re.search(r"\[(\w+)\]", (folder / kind).read_text())
    except OSError:
        return ""
    return chosen[1] if chosen else ""


def in_tensors() -> bool:
    """True if large tensors of this process have huge pages."""
    asks = os.environ.get(VARIABLE) == "1"
    return offered() == "always" or (asks and offered() == "madvise")
