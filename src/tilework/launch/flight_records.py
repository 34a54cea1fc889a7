"""A job's flight records, the last operations of each rank: the folder, and the report on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tilework.comm.launching import (
    DIRECTORY_VARIABLE,
    MAX_FILE_BYTES,
    Finding,
    FlightRecordError,
    Record,
    decode,
    diagnose,
)
from tilework.show import Page

#: The maximum of files to read: jobs hardly have more ranks.
MAX_FILES: Final = 1 << 16
_NAME: Final = re.compile(r"rank-(\d{1,6})\.json")

_NOTHING_WRONG, _EXPLAINED, _UNREADABLE = 0, 1, 2
_NO_FAULT: Final = ("fine", "slow")
_COLOURS: Final = {
    "deadlock": "bold red",
    "mismatch": "bold red",
    "failed": "bold red",
    "waiting": "bold yellow",
    "message": "bold yellow",
    "busy": "bold cyan",
    "unheard": "bold magenta",
    "slow": "bold cyan",
    "fine": "bold green",
}


@dataclass(frozen=True)
class Reading:
    """The flight records in a folder, and the files that are not usable."""

    records: dict[int, Record]
    """The flight records by rank."""
    problems: list[str]
    """Lines on files that are not used, with the reasons; a line may be about several files."""


def print_diagnosis(folder: Path, as_json: bool = False) -> int:
    """Print the diagnosis of the flight records in ``folder``: which rank waits for which, and why.

    Returns 0 if no rank waits for another, and nothing failed; 1 if something is explained; 2 if
    there is no folder, or it holds no readable record.
    """
    try:
        reading = read_latest_run(folder)
    except OSError as error:
        print(f"tilework explain: cannot read {str(folder)!r}: {error.strerror}", file=sys.stderr)
        return _UNREADABLE
    findings = diagnose(reading.records) if reading.records else []
    if as_json:
        print(json.dumps(_as_json(reading, findings), indent=2))
    else:
        _show(folder, reading, findings)
    if not reading.records:
        return _UNREADABLE
    return int(any(finding.kind not in _NO_FAULT for finding in findings))


def read_latest_run(folder: Path) -> Reading:
    """The flight records in ``folder``, of the latest run. Raises OSError if it cannot be read."""
    names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    records, problems = [], []
    for name in names[:MAX_FILES]:
        try:
            records.append(_read_one(folder / name))
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        except FlightRecordError as error:
            problems.append(f"{name} is left out: {error}")
    if len(names) > MAX_FILES:
        problems.append(f"of {len(names)} files only the first {MAX_FILES} are read")
    latest = max(records, key=lambda record: record.written, default=None)
    of_others = [record.rank for record in records if latest and record.job != latest.job]
    if of_others:
        problems.append(f"left out, as they are of another run: {_files(of_others)}")
    kept = {r.rank: r for r in records if latest and r.job == latest.job}
    return Reading(kept, problems)


def _read_one(path: Path) -> Record:
    # Not blocking, should it be a pipe.
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FlightRecordError("it is not a regular file")
        record = decode(file.read(MAX_FILE_BYTES + 1))
    if path.name != f"rank-{record.rank}.json":
        raise FlightRecordError(
            f"the file name and the record differ: the record is of rank {record.rank}"
        )
    return record


def _files(ranks: Sequence[int]) -> str:
    names = [f"rank-{rank}.json" for rank in ranks[:8]]
    return ", ".join(names) + (", …" if len(ranks) > 8 else "")


# -- showing -----------------------------------------------------------------------------


def _as_json(reading: Reading, findings: Sequence[Finding]) -> dict[str, object]:
    ranks = [
        {"rank": r.rank, "host": r.host, "pid": r.pid, "written": r.written}
        for r in reading.records.values()
    ]
    findings_json = [asdict(finding) for finding in findings]
    return {"version": 1, "findings": findings_json, "ranks": ranks, "problems": reading.problems}


def _show(folder: Path, reading: Reading, findings: Sequence[Finding]) -> None:
    lines = [(problem, "magenta") for problem in reading.problems]
    if not reading.records:
        where = f"there is no flight record in {str(folder)!r}: ranks write theirs on a fault or on"
        how = "SIGUSR1, if they were started by tilework run or with TILEWORK_FLIGHT_DIR set"
        lines += [(where, ""), (how, "")]
    for finding in findings:
        lines.append((finding.text, _COLOURS[finding.kind]))
        lines += [(f"  {line}", "") for line in finding.details]
    here = os.path.join(os.getcwd(), "")
    Page(*((text.replace(here, ""), style) for text, style in lines)).print()


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
    #: Whether the user has asked for records, or knows about them.
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
        """Remove a temporary folder, unless the user knows of it, and old folders of other jobs.

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
    with contextlib.suppress(OSError):
        status = os.lstat(folder)
        return status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_SECONDS
    return False
