"""The folder of a job's flight records, and its announcement."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tilework.comm.flight.watch import DIRECTORY_VARIABLE

_IN_LOG_DIR: Final = "flight"


@dataclass
class FlightFolder:
    """The folder that the ranks of one job write their records to; made by the first that does."""

    path: Path
    #: Whether it is only for this job, and nobody has named it.
    temporary: bool
    #: Whether the user has asked for records.
    wanted: bool = False
    _began: float = field(default_factory=time.time, compare=False)

    @staticmethod
    def choose(log_dir: Path | None, environment: Mapping[str, str]) -> FlightFolder:
        """The user's own, or one beside the logs, or one of a name that nobody guesses."""
        named = environment.get(DIRECTORY_VARIABLE)
        if named:
            return FlightFolder(Path(named).absolute(), temporary=False)
        if log_dir is not None:
            return FlightFolder((log_dir / _IN_LOG_DIR).absolute(), temporary=False)
        name = f"tilework-flight-{secrets.token_hex(8)}"
        return FlightFolder(Path(tempfile.gettempdir(), name), temporary=True)

    def announce(self) -> str:
        """The line to print after a failure, naming the folder; "" without records."""
        written = sum(1 for path in self.path.glob("rank-*.json") if self._is_new(path))
        if not written:
            return ""
        ranks = "1 rank" if written == 1 else f"{written} ranks"
        return f"who waited for whom: tilework explain {self.path} (records of {ranks})"

    def close(self, failed: bool) -> None:
        """Remove the folder unless it was announced."""
        if self.temporary and not failed and not self.wanted:
            shutil.rmtree(self.path, ignore_errors=True)

    def _is_new(self, path: Path) -> bool:
        try:
            # Clocks of file systems are coarse.
            return os.stat(path).st_mtime > self._began - 1.0
        except OSError:
            return False
