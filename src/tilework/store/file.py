"""A store in a file, for the processes of one host or of a shared file system."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from tilework.errors import DistStoreError
from tilework.store import checks
from tilework.store.arrivals import Arrivals
from tilework.store.contract import DEFAULT_TIMEOUT
from tilework.store.late_notice import KeyWait
from tilework.store.log import Log
from tilework.store.requesting import RequestStore
from tilework.store.wire import Code, WireMessage

#: Pauses between looks at the file while waiting, in seconds: from the first to the longest.
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02


class FileStore(RequestStore):
    """A store that any number of processes share through one file.

    The file is a log (see :mod:`tilework.store.log`): each change is one record, appended
    under a lock. Therefore ``set``, ``add``, ``compare_set``, ``append`` and ``delete_key`` are
    atomic across processes. A killed writer leaves at most an incomplete last record, which readers
    ignore and the next writer cuts off. If the disk is full, a change raises and changes nothing.
    The log only grows: it is meant for start-up, not for bulk data. A wait polls the file every 0.5
    to 20 ms.

    Keys that an earlier job left at ``path`` still exist: use a new path for each job.

    Args:
        path: The file; created (mode 0600) if missing, an empty one is fine.
        world_size: How many stores will be made on ``path``, over all processes. If positive, the
            file is removed when the last of them closes.
        timeout: How long blocking methods wait, and how long any change waits for the file's lock.

    Raises:
        DistStoreError: The file cannot be opened or written, is damaged, or is no store's file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with FileStore(f"{folder}/my-job") as a, FileStore(f"{folder}/my-job") as b:
        ...         a.set("k", "v")
        ...         b.get("k")
        b'v'
    """

    is_of_one_host = True  # where the locks work that show which processes have ended

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(timeout)
        if sys.platform == "win32":
            raise DistStoreError(
                f"FileStore needs a system with flock, this is {sys.platform}; use TCPStore "
                f"between processes, or HashStore between threads"
            )
        #: The file, as an absolute path.
        self.path = os.path.abspath(os.fspath(path))
        self._log = Log(self.path, world_size, checks.seconds(timeout))
        self._expected = world_size
        # Also when the store is dropped, and at exit: others count on the last one to clean up.
        self._finalizer = weakref.finalize(self, self._log.close)

    def _send(
        self, code: Code, fields: Sequence[bytes], lines: KeyWait | None = None, left: float = 0.0
    ) -> WireMessage:
        deadline, pause = checks.Deadline(left), _FIRST_PAUSE
        while True:
            late = deadline.passed
            answer = self._log.answer(code, fields, checks.seconds(self._timeout))
            if answer.code != Code.TIMEOUT or late or lines is None:
                return answer
            lines.look(answer.fields)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def arrivals(self) -> Arrivals | None:
        """Counts of the stores made on this file; None where the system lacks the locks for it."""
        if self._log.number == 0:
            return None
        with self._log.mutex:
            self._log.ensure_open()
            self._log.refresh()
            lost = frozenset(map(str, self._log.lost()))
            return Arrivals(max(0, self._expected), self._log.opened, lost)

    @property
    def arrival_name(self) -> str:
        """This store's number among the stores made on the file; empty where nobody counts them."""
        return str(self._log.number or "")

    def close(self) -> None:
        """Close the file; the last of ``world_size`` stores removes it. Idempotent."""
        self._finalizer()

    @property
    def authenticated(self) -> bool:
        """True if the file belongs to this user and nobody else may write to it."""
        with self._log.mutex:
            self._log.ensure_open()
            return self._log.private

    def __repr__(self) -> str:
        return str(self._log)
