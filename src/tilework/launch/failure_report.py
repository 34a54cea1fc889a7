"""Failure reports, which a failing rank sends to the launcher through a separate pipe.

A traceback printed to stderr would mix with other ranks' output and have no time. Therefore a rank
writes one line of JSON to this pipe as soon as the program has failed. After a crash in native
code, faulthandler's trace stands there instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from types import FrameType, TracebackType
from typing import Any, Final

from tilework.comm.launching import in_library
from tilework.errors import text_of
from tilework.from_torch import MODULES

# Each hint is a function of the error and of the frames that it came through, outermost first.
# Hints load no package: an error about a package comes from a program that has loaded the package.

_NO_GROUP: Final = re.compile(
    "Default process group has not been init|Error initializing torch.distributed using env://"
)
_VIEW: Final = re.compile(r"shape '\[(?P<shape>[-\d, ]+)\]' is invalid for input of size \d+")


def hint(error: BaseException) -> str:
    """The advice for ``error``; empty where there is none. Never raises."""
    with suppress(Exception):  # the error must be reported, whatever objects are in the frames
        text = text_of(error)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for advise in _ADVICE:
            if advice := advise(text, frames):
                return advice
    return ""


def _torch_has_no_group(text: str, frames: Sequence[FrameType]) -> str:
    if not _NO_GROUP.search(text) or _world() is None or _world().default_group is None:
        return ""
    theirs, ours = _modules(frames)
    return (
        f"the program made tilework's process group and called {theirs}, which has another: import "
        f"{ours} in place of {theirs}, or make torch's group by "
        'import tilework.torch_backend; torch.distributed.init_process_group("tilework")'
    )


def _modules(frames: Sequence[FrameType]) -> tuple[str, str]:
    """The module of torch that the program called, and the module here that has the names."""
    for frame in frames:
        module = str(frame.f_globals.get("__name__"))
        while "." in module and module not in MODULES:
            module = module.rpartition(".")[0]
        if not MODULES.get(module, "tilework.distributed").startswith("tilework.distributed"):
            return module, MODULES[module]
    return "torch.distributed", "tilework.distributed"


def _world() -> Any:
    """The state of this rank; None in a program that has not loaded it."""
    module: Any = sys.modules.get("tilework.comm.world")
    return None if module is None else module.current_world()


def _torch_wants_a_port(text: str, frames: Sequence[FrameType]) -> str:
    name = re.search(r"MASTER_ADDR|MASTER_PORT", text)
    if name is None or name[0] in os.environ or "TILEWORK_STORE" not in os.environ:
        return ""
    return (
        "torch's own env:// meets at a TCP port, which the launcher sets if asked: tilework run "
        "--tcp …; or let torch meet without a port by import tilework.torch_backend"
    )


def _heads_do_not_divide(text: str, frames: Sequence[FrameType]) -> str:
    found = _VIEW.search(text)
    if found is None:
        return ""
    width = int(found["shape"].rpartition(",")[2])
    for features, parts, name in _sharded_layers(frames):
        if width > 0 and features % width == 0 and features // width % parts:
            heads = features // width
            shares = [heads // parts + (part < heads % parts) for part in range(parts)]
            sizes = ", ".join(str(width * share) for share in shares)
            return (
                f"{name} has {heads} heads of {width} features, which {parts} ranks cannot share "
                f"evenly: use a number of ranks that divides {heads}, or whole heads for each "
                f"rank, ColwiseParallel(output_layouts=Shard(-1, sizes=({sizes}))), and the same "
                f"sizes for the input_layouts of the layer after it"
            )
    return ""


def _sharded_layers(frames: Sequence[FrameType]) -> Iterator[tuple[int, int, str]]:
    """(output features, ranks, name) of layers in ``frames`` that shard these, innermost first."""
    dtensor: Any = sys.modules.get("tilework.dtensor")
    if dtensor is None:
        return
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        for name, child in getattr(module, "_modules", {}).items():
            weight = getattr(child, "weight", None)
            if isinstance(weight, dtensor.DTensor):
                for axis, placement in enumerate(weight.placements):
                    if placement.is_shard(0):
                        yield weight.shape[0], weight.device_mesh.size(axis), name


def _file_of_dtensors(text: str, frames: Sequence[FrameType]) -> str:
    if "Unsupported global: GLOBAL tilework.dtensor" not in text:
        return ""
    return (
        "the file holds DTensors, which torch.load reads with weights_only=True after "
        "import tilework.dtensor, in a job of as many ranks as saved it"
    )


_ADVICE: Final[tuple[Callable[[str, Sequence[FrameType]], str], ...]] = (
    _torch_has_no_group,
    _torch_wants_a_port,
    _heads_do_not_divide,
    _file_of_dtensors,
)


#: The end of a traceback names the error; longer tracebacks lose their beginning.
MAX_TRACEBACK_CHARS: Final = 128 << 10
#: The first line of an error's message; longer than any message of tilework.
MAX_SUMMARY_CHARS: Final = 2000
_MARK: Final = b'{"tilework": '
#: Frames in these files belong to the launcher, not to the program.
_OWN_FILES: Final = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("rank.py", "program.py", "pool.py")
)


@cache
def _package_folders() -> tuple[str, ...]:
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
    has_met: bool = True
    """False if the rank never was in a default group."""


def describe(error: BaseException, exit_code: int) -> FailureReport:
    """The report of ``error``; SystemExit and KeyboardInterrupt give no summary or traceback."""
    quiet = isinstance(error, SystemExit | KeyboardInterrupt)
    trace = [] if quiet else traceback.format_exception(type(error), error, _program_frames(error))
    return FailureReport(
        time=time.monotonic(),
        classes=tuple(sorted(_class_names(error))),
        summary="" if quiet else summary(error),
        traceback="".join(trace)[-MAX_TRACEBACK_CHARS:],
        exit_code=exit_code,
        site="" if quiet else _site(error),
        hint="" if quiet else hint(error),
        has_met=_world() is not None and _world().has_met,
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
    """``file:line`` where the program failed: the innermost frame in the program's own files."""
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


def _program_frames(error: BaseException) -> TracebackType | None:
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


#: Seconds to collect failures after a failure that looks like a cause.
SETTLE_SECONDS: Final = 0.1
#: Seconds to wait for a cause when only consequences have been seen.
PATIENCE_SECONDS: Final = 0.5

#: A death by signal is noticed late; a report carries the exact time of the failure.
_NOTICED_LATE_SECONDS: Final = 0.1

#: Classes that say "another rank is at fault", or probably follow from such a fault.
_CONSEQUENCES: Final = re.compile(
    r"tilework\.errors\.(PeerLostError|DistNetworkError|DistStoreError|CollectiveTimeoutError)"
    r"|builtins\.ConnectionError"
    r"|torch\.distributed\.Dist(Backend|Network|Store)Error"
)
#: torch's Gloo says so in plain RuntimeErrors.
_CONSEQUENCE_TEXTS: Final = re.compile(r"gloo/transport|Connection closed by peer")


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank by itself, not because the launcher ended it."""

    rank: int
    """The global rank."""
    time: float
    """``time.monotonic()`` at the failure, or when it was noticed."""
    code: int
    """Exit code, or minus the number of the signal that ended or stopped the rank."""
    report: FailureReport | None = None
    """The rank's report; None after a signal or ``os._exit``."""
    crash_trace: str = ""
    """faulthandler's trace of a crash in native code."""
    node: str = ""
    """The node of the rank in words, if it is another node, which prints the traceback there."""
    lost_node: str = ""
    """The ranks in words, if their whole node is gone; ``rank`` is the first of them."""

    @property
    def exit_status(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    @property
    def signal(self) -> int | None:
        return -self.code if self.code < 0 else None

    @property
    def traceback(self) -> str:
        """The traceback, or the trace of the crash; empty if the rank left neither."""
        return self.report.traceback if self.report and self.report.traceback else self.crash_trace

    @property
    def is_consequence(self) -> bool:
        """True if this may be a consequence of another rank's failure."""
        if self.report is None:
            return self.signal == signal.SIGABRT  # native code aborts when a peer is gone
        return any(map(_CONSEQUENCES.fullmatch, self.report.classes)) or bool(
            _CONSEQUENCE_TEXTS.search(self.report.summary)
        )

    @property
    def never_met(self) -> bool:
        """True if the rank gave up meeting others, because some were lost."""
        return self.is_consequence and self.report is not None and not self.report.has_met

    @property
    def is_echo(self) -> bool:
        """True if the message only repeats the error with which another rank aborted a group."""
        return self.report is not None and "aborted by rank " in self.report.summary

    @property
    def happened(self) -> float:
        """The best guess of the real time of the failure."""
        return self.time - (_NOTICED_LATE_SECONDS if self.report is None else 0.0)


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that caused the others; ``failures`` must not be empty.

    The peers of a rank that dies fail a moment later because they miss it, and the launcher may
    hear of them first: it collects failures for a moment. A failure that does not look like the
    consequence of another is preferred; among equals, the earliest.
    """
    return min(failures, key=lambda f: (f.is_consequence, f.is_echo, f.happened, f.rank))


def settle_time(failures: Sequence[RankFailure]) -> float:
    """``time.monotonic()`` after which there is no need to wait for further failures."""
    first = min(failure.time for failure in failures)
    only_consequences = all(failure.is_consequence for failure in failures)
    return first + (PATIENCE_SECONDS if only_consequences else SETTLE_SECONDS)
