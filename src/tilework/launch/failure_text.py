"""Text of failures for a person."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from tilework.comm.launching import in_library, named
from tilework.launch.failure_report import RankFailure

#: ``full`` shows every frame.
VARIABLE: Final = "TILEWORK_TRACEBACK"
_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: A frame's first line; the margin of an exception group has bars.
_FRAME: Final = re.compile(r'(?P<margin>[ |]*)  File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def folded(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` with each run of frames of tilework, torch and the interpreter as one line.

    Unchanged with ``TILEWORK_TRACEBACK=full``, or if no frame belongs to the program.
    """
    blocks = _blocks(text.split("\n"))
    own = [frame for frame, _ in blocks if frame is not None and not in_library[frame["file"]]]
    if environment.get(VARIABLE) == "full" or not own:
        return text
    lines: list[str] = []
    run: list[re.Match[str]] = []
    is_told = False
    for frame, block in [*blocks, (None, [])]:
        if frame is not None and in_library[frame["file"]]:
            run.append(frame)
            continue
        if run:
            hint = "" if is_told else f"; {VARIABLE}=full shows all"
            lines.append(_fold(run, hint))
            run, is_told = [], True
        lines += block
    return "\n".join(lines)


def _blocks(lines: Sequence[str]) -> list[tuple[re.Match[str] | None, list[str]]]:
    """The lines of a traceback in blocks: each frame with the lines of source below it."""
    blocks: list[tuple[re.Match[str] | None, list[str]]] = []
    inside = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None and inside and line.startswith((inside, f"{inside[:-2]}[Previous")):
            blocks[-1][1].append(line)
            continue
        blocks.append((frame, [line]))
        inside = f"{frame['margin']}    " if frame is not None else ""
    return blocks


def _fold(run: Sequence[re.Match[str]], hint: str) -> str:
    count = "1 frame" if len(run) == 1 else f"{len(run)} frames"
    owners = " and ".join(dict.fromkeys(_owner(frame["file"]) for frame in run))
    last = run[-1]
    where = f"{os.path.basename(last['file'])}:{last['line']}"
    return f"{last['margin']}  ... {count} of {owners}, to {where}{hint}"


def _owner(file: str) -> str:
    if file.startswith("<frozen "):
        return "Python"
    return "tilework" if file.startswith(_OWN_FOLDER) else "torch"


_BOLD_RED, _DIM, _RESET = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"

#: Room for a line of a terminal, or of a log's overview.
MAX_HEADLINE_CHARS: Final = 120
_MAX_SITE_CHARS: Final = 40
_CUT: Final = " …"
#: The end of a clause.
_CLAUSE: Final = re.compile(r"([;:.)]|,(?= [a-z]))(?= )")

#: Words of torch's C++ code before those for a person.
_TORCHS_CHECK: Final = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")

#: The usual reason for a signal.
_HINTS: Final = {
    "SIGKILL": "somebody killed it; often the kernel, for want of memory (see dmesg)",
    "SIGSEGV": "native code used memory that is not its own",
    "SIGBUS": "native code used memory that could not be provided",
    "SIGILL": "native code uses instructions that this processor lacks",
    "SIGABRT": "native code gave up; its last words are above",
    "SIGSTOP": "somebody stopped it, and all others have finished",
}


def _headline_and_rest(failure: RankFailure) -> tuple[str, str | None]:
    """The headline, and the rest of the error's first line; None: the headline has the whole."""
    if failure.lost_node:
        return f"{failure.lost_node} failed: {cause(failure)}", None
    report = failure.report
    site = report.site if report is not None else ""
    if len(site) > _MAX_SITE_CHARS:  # the traceback has the path
        site = os.path.basename(site)
    where = f" at {site}" if site else ""
    where += f" on {failure.node}" if failure.node else ""
    there = failure.node and report is not None and report.summary
    start, end = f"rank {failure.rank} failed{where}: ", "; see there" if there else ""
    how, room = cause(failure), MAX_HEADLINE_CHARS - len(start) - len(end)
    if len(how) <= room or report is None or not report.summary:
        return f"{start}{how}{end}", None
    text = _TORCHS_CHECK.sub("", report.summary.partition(": ")[2]) + _unusual_ending(failure)
    told = text if len(text) <= room else _beginning(text, room - len(_CUT))
    cut = _CUT if told != text else ""
    return f"{start}{told}{cut}{end}", text[len(told) :].strip()


def _beginning(text: str, room: int) -> str:
    """As many clauses of ``text`` as there is room for, or words if that is too little."""
    clauses = [found.end(1) for found in _CLAUSE.finditer(text) if found.end(1) <= room]
    end = clauses[-1] if clauses else 0
    if end < room * 3 // 4:
        end = max(end, text.rfind(" ", 0, room + 1))
    return text[: end if end > 0 else max(room, 0)]


def failure_text(failure: RankFailure, colour: bool = False) -> str:
    """The headline, the traceback below it and any advice, each line ended."""
    head, rest = _headline_and_rest(failure)
    if colour:
        head = f"{_BOLD_RED}{head}{_RESET}"
    report = failure.report
    trace = folded(failure.traceback)
    if report is not None and report.summary:
        trace = _without_told(trace, report.summary, rest)
    advice = f"hint: {report.hint}\n" if report is not None and report.hint else ""
    return f"{head}\n{_indented(trace)}{advice}"


def _without_told(trace: str, summary: str, rest: str | None) -> str:
    name = summary.partition(":")[0]
    lines = trace.split("\n")
    for i in reversed(range(len(lines))):
        if re.fullmatch(rf"[\w.<>]*{re.escape(summary)}", lines[i]):
            lines[i : i + 1] = [] if rest is None else [f"{name}: … {rest}" if rest else name]
            break
    return "\n".join(lines)


def other_failures_text(
    root: RankFailure, failures: Sequence[RankFailure], colour: bool = False
) -> str:
    """A line for each kind of failure of ranks that failed besides ``root``; empty without any.

    If the failure is a consequence of another rank's failure, or the error is of the class of
    ``root``'s error, the line has only that class.
    """
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        name = _class(failure)
        known = name and (failure.is_consequence or name == _class(root))
        how = name + _unusual_ending(failure) if known else cause(failure)
        ranks.setdefault(how, []).append(failure.rank)
    lines = [f"then failed {named(who)}: {how}" for how, who in ranks.items()]
    if colour:
        lines = [f"{_DIM}{line}{_RESET}" for line in lines]
    return "".join(f"{line}\n" for line in lines)


def _class(failure: RankFailure) -> str:
    return failure.report.summary.partition(":")[0] if failure.report is not None else ""


def cause(failure: RankFailure) -> str:
    """The failure in words, without the rank's number."""
    if failure.lost_node:
        return f"{failure.node} is gone: it was killed or stopped, or the link to it is cut"
    if failure.report is not None and failure.report.summary:
        return failure.report.summary + _unusual_ending(failure)
    how = _ending(failure)
    return f"{how} ({_HINTS[how]})" if how in _HINTS else how


def _unusual_ending(failure: RankFailure) -> str:
    """The exit code or signal in parentheses; empty for 1, the exit code after an exception."""
    return "" if failure.code == 1 else f" ({_ending(failure)})"


def _ending(failure: RankFailure) -> str:
    if failure.signal is None:
        return f"exit code {failure.code}"
    try:
        return signal.Signals(failure.signal).name
    except ValueError:  # a real-time signal
        return f"signal {failure.signal}"


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.rstrip("\n").split("\n")) if text else ""
