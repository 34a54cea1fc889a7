"""The guardian: a tiny process that cleans up after a launcher that was killed.

A launcher that gets SIGKILL runs no code any more. On Linux the kernel then kills the ranks,
but not what they started; elsewhere nobody does. So a shell of a few hundred kilobytes waits
on a pipe from the launcher: it reads which process groups there are, and when the pipe closes
without a farewell, it kills them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Final

_SCRIPT: Final = """
trap '' INT TERM HUP QUIT
groups=
while read -r line; do
  if [ "$line" = done ]; then exit 0; fi
  groups="$groups $line"
done
for group in $groups; do kill -KILL "-$group" 2>/dev/null; done
if [ -n "$1" ]; then rm -rf -- "$1"; fi
"""


class Guardian:
    """Kills process groups and removes a folder should this process die without :meth:`close`.

    Where there is no ``/bin/sh`` it does nothing, and :attr:`pid` is None.

    Args:
        folder: Removed as well; None: nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        reader, self._writer = os.pipe()
        arguments = ["/bin/sh", "-c", _SCRIPT, "tilework-guardian", str(folder or "")]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
                cwd="/",
            )
        except OSError:
            self._drop_writer()
        finally:
            os.close(reader)

    @property
    def pid(self) -> int | None:
        """Its process id, None where it could not be started."""
        return None if self._process is None else self._process.pid

    def watch(self, group: int) -> None:
        """Add a process group to those that it would kill."""
        self._write(f"{group}\n")

    def forget_in_child(self) -> None:
        """Close the pipe in a forked child, so that only the launcher holds it."""
        self._drop_writer()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child: nothing to wait for
            self._process = None

    def close(self) -> None:
        """Say farewell and wait for its end (milliseconds). Idempotent."""
        if self._process is None:
            return
        self._write("done\n")
        self._drop_writer()
        self._process.wait()
        self._process = None

    def _write(self, line: str) -> None:
        # Somebody may have killed it: that costs the protection, not the job.
        if self._writer >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._writer, line.encode())

    def _drop_writer(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
