"""The folder of a job's flight records (last operations of each rank), and the line about it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tilework.comm.flight.internal import DIRECTORY_VARIABLE, diagnose
from tilework.launch.diagnosis_report import read_latest_run

_IN_LOG_DIR: Final = "flight"
_PREFIX: Final = "tilework-flight-"
_NAME_BYTES: Final = 8
#: The age after which nobody will look at a folder any more.
_OLD_SECONDS: Final = 7 * 24 * 3600.0


@dataclass
class FlightFolder:
    """The folder that the ranks of a job write flight records to; made with the first record."""

    #: The folder.
    path: Path
    #: Whether the folder is only for this job, and was not named by the user.
    temporary: bool
    #: Whether the user has asked for records, or was told about them.
    wanted: bool = False
    _began: float = field(default_factory=time.time, compare=False)

    @staticmethod
    def choose(log_dir: Path | None, environment: Mapping[str, str]) -> FlightFolder:
        """The folder named in ``environment``; else inside ``log_dir``; else a temporary folder."""
        named = environment.get(DIRECTORY_VARIABLE)
        if named:
            return FlightFolder(Path(named).absolute(), temporary=False)
        if log_dir is not None:
            return FlightFolder((log_dir / _IN_LOG_DIR).absolute(), temporary=False)
        name = f"{_PREFIX}{secrets.token_hex(_NAME_BYTES)}"
        return FlightFolder(Path(tempfile.gettempdir(), name), temporary=True)

    def announce(self) -> str:
        """The line to print after a failure, naming the folder; empty if records show no fault."""
        written = sum(1 for path in self.path.glob("rank-*.json") if self._is_new(path))
        if not written or not self._explains():
            return ""
        self.wanted = True
        ranks = "1 rank" if written == 1 else f"{written} ranks"
        return f"who waited for whom: tilework explain {self.path} (records of {ranks})"

    def close(self) -> None:
        """Remove a temporary folder, unless the user was told of it, and old folders of other jobs.

        A folder that the user has chosen stays.
        """
        if not self.temporary:
            return
        if not self.wanted:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in self.path.parent.glob(f"{_PREFIX}{'[0-9a-f]' * 2 * _NAME_BYTES}"):
            if _is_old(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _explains(self) -> bool:
        """True if the diagnosis of the records finds a fault, such as a rank that waits."""
        with contextlib.suppress(OSError):
            kinds = {finding.kind for finding in diagnose(read_latest_run(self.path).records)}
            return not kinds <= {"fine", "slow", "unheard"}
        return False

    def _is_new(self, path: Path) -> bool:
        try:
            # Clocks of file systems are coarse.
            return os.stat(path).st_mtime > self._began - 1.0
        except OSError:
            return False


def _is_old(folder: Path) -> bool:
    """True for a folder of this user to which nobody has written for a week."""
    with contextlib.suppress(OSError):
        status = os.lstat(folder)
        return status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_SECONDS
    return False
