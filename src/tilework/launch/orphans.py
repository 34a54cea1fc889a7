"""Processes that outlive ranks, which the launcher ends, or the launcher: a guardian ends them.

A launcher that gets SIGKILL runs no more code. On Linux the kernel then kills the ranks, but not
the processes that they started; elsewhere nobody does. Therefore a shell of a few hundred kilobytes
waits on a pipe from the launcher. It reads the numbers of process groups; when the pipe closes
without a farewell, it kills the groups, and then looks for processes that have left them. Every
process of the job bears the job's *mark*: in the environment, which programs pass to the processes
that they start, or, in a fork of a rank that has loaded no other program, in the mappings.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from tilework.launch import linux, sweep
from tilework.launch.sweep import MARK_VARIABLE

#: Seconds for processes that a program leaves running on purpose (a compressor, an upload).
PATIENCE_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01


def reap_orphans(but: Collection[int]) -> None:
    """Reap children of this process that have ended, except those in ``but``.

    All other children are adopted: ranks have started them and left them behind.
    """
    for pid in linux.child_pids():
        if pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_orphans(seconds: float, but: Collection[int]) -> list[str]:
    """Wait for adopted processes (children not in ``but``) to end, then kill the rest: return
    these, as "1234 (name)".
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reap_orphans(but)
        if not _others(but):
            return []
        time.sleep(_POLL_SECONDS)
    killed: dict[int, str] = {}
    # We may adopt the children of each killed process: look again until there are none.
    while orphans := _others(but):
        for pid in orphans:
            killed.setdefault(pid, f"{pid} ({linux.command_of(pid)})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        reap_orphans(but)
    return list(killed.values())


def _others(but: Collection[int]) -> list[int]:
    return [pid for pid in linux.child_pids() if pid not in but]


_SCRIPT: Final = """
trap '' INT TERM HUP QUIT
groups=
while read -r line; do
  if [ "$line" = done ]; then exit 0; fi
  groups="$groups $line"
done
for group in $groups; do kill -KILL "-$group" 2>/dev/null; done
for folder in "$4" "$5"; do if [ -n "$folder" ]; then rm -rf -- "$folder"; fi; done
if [ -n "$3" ]; then exec "$1" -I -S "$2" "$3" >/dev/null 2>&1 </dev/null; fi
"""


class Guardian:
    """Kills a job's processes, and removes the folders of the job's store and of the ranks' results
    (None: there is none), if this process dies without calling close.

    Without ``/bin/sh`` on this system it does nothing, and :attr:`pid` is None.
    """

    def __init__(self, folder: Path | None = None, results: str | None = None) -> None:
        #: The value of :data:`MARK_VARIABLE` for the job's processes.
        self.mark = secrets.token_hex(12)
        reader, self._writer = os.pipe()
        mark = self.mark if sys.platform == "linux" and sys.executable else ""
        # The guardian must not bear the mark, nor the mark of a job around this launcher.
        environment = {name: text for name, text in os.environ.items() if name != MARK_VARIABLE}
        folders = [str(folder or ""), results or ""]
        arguments = ["/bin/sh", "-c", _SCRIPT, "tilework-guardian"]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [*arguments, sys.executable, sweep.__file__, mark, *folders],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # ignores the terminal's Ctrl-C and hang-up
                cwd="/",
            )
        except OSError:
            self._drop_writer()
        finally:
            os.close(reader)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def watch(self, group: int) -> None:
        self._write(f"{group}\n")

    def forget_in_child(self) -> None:
        """Close the pipe in a forked child, so that only the launcher holds it."""
        self._drop_writer()
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process: nothing to wait for
            self._process = None

    def close(self) -> None:
        """End the guardian without killing others, and wait for it (milliseconds). Idempotent."""
        if self._process is None:
            return
        self._write("done\n")
        self._drop_writer()
        self._process.wait()
        self._process = None

    def _write(self, line: str) -> None:
        # If somebody has killed the guardian, the protection is lost, not the job.
        if self._writer >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._writer, line.encode())

    def _drop_writer(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
