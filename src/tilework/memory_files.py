"""Memory files that other processes of the host can open. Linux.

The kernel keeps a memory file (memfd) as long as any process has it open or mapped; nothing remains
of it afterwards, however the processes ended.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import Final, NamedTuple


class MemoryFile(NamedTuple):
    """A memory file of a process, as other processes of the same user on the host open it.

    The name has a random part. So a file on another host, or of a later process of the same number,
    is never mistaken for this file.

    Attributes:
        pid: The process that made the file.
        fd: The number of the file's descriptor in that process, which closes it.
        name: The name of the file, which the kernel shows to processes that may open it.
    """

    pid: int
    fd: int
    name: str

    @classmethod
    def create(cls, purpose: str) -> MemoryFile:
        """Make an empty file. Raises OSError, also where the system has no memory files."""
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory files")
        name = f"tilework-{purpose}-{secrets.token_hex(16)}"
        return cls(os.getpid(), os.memfd_create(name, os.MFD_CLOEXEC), name)

    def open(self, flags: int) -> int:
        """A descriptor of the file in this process; -1 if this process cannot open the file."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", flags | os.O_CLOEXEC)
        except OSError:
            return -1
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{self.name}"):
            return fd
        os.close(fd)
        return -1

    def is_reachable(self) -> bool:
        """True if this process can open the memory files of the process that made this file."""
        fd = self.open(os.O_RDONLY)
        if fd >= 0:
            os.close(fd)
        return fd >= 0


#: No file, where the system has none to give.
NO_MEMORY_FILE: Final = MemoryFile(-1, -1, "")
