"""Failure reports, which a failing rank sends to the launcher through a separate pipe.

A traceback printed to stderr would mix with other ranks' output and have no time. Therefore a rank
writes one line of JSON to this pipe as soon as the program has failed. After a crash in native
code, faulthandler's trace stands there instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from types import TracebackType
from typing import Final

from tilework.comm.per_call.internal import in_library
from tilework.errors import text_of
from tilework.launch.hints import hint

#: The end of a traceback names the error; longer tracebacks lose their beginning.
MAX_TRACEBACK_CHARS: Final = 128 << 10
#: The first line of an error's message; longer than any message of tilework.
MAX_SUMMARY_CHARS: Final = 2000
_MARK: Final = b'{"tilework": '
#: Frames in these files belong to the launcher, not to the program.
_OWN_FILES: Final = tuple(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("rank.py", "program.py", "spawned.py", "packing.py", "pool.py")
)


@cache
def _package_folders() -> tuple[str, ...]:
    """The folders of Python's own modules, and of installed packages."""
    return tuple({sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class FailureReport:
    """A rank's report to the launcher of how the program has failed."""

    time: float
    """``time.monotonic()`` at the failure; comparable between processes of one host."""
    classes: tuple[str, ...]
    """Class names of the exception and of the causes, with bases."""
    summary: str
    """``ValueError: message``, one line; empty for ``sys.exit``."""
    traceback: str
    """The whole traceback; empty for ``sys.exit``."""
    exit_code: int
    """The exit code of the process."""
    site: str = ""
    """``file:line`` of the innermost frame of the program; empty if no frame is the program's."""
    hint: str = ""
    """Advice for an error that does not come from tilework; empty if there is no advice."""


def describe(error: BaseException, exit_code: int) -> FailureReport:
    """The report of ``error``; SystemExit and KeyboardInterrupt give no summary or traceback."""
    quiet = isinstance(error, SystemExit | KeyboardInterrupt)
    text = "" if quiet else _format(error)
    return FailureReport(
        time=time.monotonic(),
        classes=tuple(sorted(_class_names(error))),
        summary="" if quiet else summary(error),
        traceback=text[-MAX_TRACEBACK_CHARS:],
        exit_code=exit_code,
        site="" if quiet else _site(error),
        hint="" if quiet else hint(error),
    )


def encode(report: FailureReport) -> bytes:
    """The report as a line of JSON for the pipe to the launcher."""
    return _MARK + json.dumps(asdict(report)).encode() + b"}\n"


def decode(data: bytes) -> tuple[FailureReport | None, str]:
    """(the report, or None; the trace of faulthandler, or an empty text) in the bytes of a pipe."""
    report, trace = None, []
    for line in data.split(b"\n"):
        if line.startswith(_MARK):
            report = _decode_line(line) or report
        else:
            trace.append(line.decode(errors="replace"))
    return report, "\n".join(_program_lines(trace)).strip()


def _program_lines(trace: Iterable[str]) -> Iterator[str]:
    """The lines of a faulthandler trace, without the launcher's frames that called the program."""
    below = False
    for line in trace:
        frame = line.startswith("  File ")
        below = frame and (below or any(f'"{file}"' in line for file in _OWN_FILES))
        # Python 3.12 and later end with a list of all native modules, which helps nobody.
        if not below and not line.startswith("Extension modules:"):
            yield line


def _decode_line(line: bytes) -> FailureReport | None:
    try:
        fields = json.loads(line)["tilework"]
        return FailureReport(**{**fields, "classes": tuple(fields["classes"])})
    except (ValueError, TypeError, KeyError):
        return None  # cut off, as the rank died while writing


def _site(error: BaseException) -> str:
    """``file:line`` where the program failed: the innermost frame in the program's own files.

    Without any of these, the innermost frame of a package that the program uses; empty without
    frames.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_near(error.filename)}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(_program_frames(error))
        if not in_library[frame.f_code.co_filename]
    ]
    own = [(file, line) for file, line in frames if not file.startswith(_package_folders())]
    if not frames:
        return ""
    file, line = (own or frames)[-1]
    return f"{_near(file)}:{line}"


def _near(file: str) -> str:
    """The path, relative to the current folder if the file is below it."""
    with contextlib.suppress(OSError):
        return file.removeprefix(os.path.join(os.getcwd(), ""))
    return file


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _program_frames(error)))


def _program_frames(error: BaseException) -> TracebackType | None:
    """The error's traceback without the launcher's frames at the top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return frames


def _class_names(error: BaseException | None) -> set[str]:
    """Qualified names of the classes of ``error`` and of the errors that caused it, with bases."""
    names: set[str] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        names |= {f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__}
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return names


def summary(error: BaseException) -> str:
    """The class and the first line of the message of ``error``, as in ``ValueError: message``."""
    text = text_of(error).strip().partition("\n")[0]
    name = type(error).__qualname__
    if len(text) > MAX_SUMMARY_CHARS:
        text = f"{text[:MAX_SUMMARY_CHARS]}…"
    return f"{name}: {text}" if text else name
